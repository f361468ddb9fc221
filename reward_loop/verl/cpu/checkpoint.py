"""verl's checkpoint engine for a CPU: weights go from the trainer to stand-alone rollouts through Ray's object store.

verl's own backends need RDMA or a GPU. This one is ``actor_rollout_ref.rollout.checkpoint_engine.backend=ray``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from reward_loop.verl.cpu.mailbox import Mailbox

__all__ = ["RayCheckpointEngine"]

RECEIVE_TIMEOUT_S = 600.0
"""Seconds until the weights must be there."""


@CheckpointEngineRegistry.register("ray")
class RayCheckpointEngine(CheckpointEngine):
    """One side of a transfer: rank 0 of the trainer sends, rollouts receive, the trainer's other ranks only take part
    in gathering the tensors.

    Args:
        bucket_size: bytes of one object in the store, at the least; a larger tensor has one to itself.
        is_master: whether this is rank 0 of the trainer.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_size = bucket_size
        self._mailbox: Any = ray.remote(Mailbox).options(num_cpus=0).remote() if is_master else None
        self._sends = False

    def prepare(self) -> dict[str, Any]:
        """Empties the mailbox, and says where it is."""
        if self._mailbox is not None:
            ray.get(self._mailbox.empty.remote())
        return {"mailbox": self._mailbox}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells everyone where the mailbox is, and who sends: the arguments of :meth:`init_process_group` by rank."""
        mailbox = metadata[0]["mailbox"]
        actors = {
            "mailbox": [mailbox] * actor_wg_world_size,
            "sends": [rank == 0 for rank in range(actor_wg_world_size)],
        }
        rollouts = {"mailbox": [mailbox] * rollout_world_size, "sends": [False] * rollout_world_size}
        return actors, rollouts

    def init_process_group(self, mailbox: Any, sends: bool) -> None:
        """Takes down what :meth:`build_topology` said."""
        self._mailbox = mailbox
        self._sends = sends

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Sends full tensors. Every rank goes through the whole generator: gathering a tensor is a collective."""
        buckets: list[Any] = []
        bucket: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if not self._sends:
                continue
            if bucket and sum(t.nbytes for t in bucket.values()) >= self._bucket_size:
                buckets.append(ray.put(bucket))
                bucket = {}
            bucket[name] = tensor.detach().to("cpu")
        if self._sends:
            buckets.append(ray.put(bucket))
            await self._mailbox.put.remote(buckets)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields names and full tensors."""
        for bucket in await _within(self._mailbox.get.remote()):
            for name, tensor in (await _within(bucket)).items():
                yield name, tensor

    def finalize(self) -> None:
        """The mailbox holds the weights until the next transfer."""


async def _within(reference: Any) -> Any:
    async with asyncio.timeout(RECEIVE_TIMEOUT_S):
        return await reference
