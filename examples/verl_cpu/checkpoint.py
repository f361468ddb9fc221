"""A checkpoint engine for CPUs: sends weights from the trainer to stand-alone rollouts through Ray's object store.

verl's own backends need RDMA or a GPU. Select this one with
``actor_rollout_ref.rollout.checkpoint_engine.backend=ray``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from examples.verl_cpu.server import TRANSFER_TIMEOUT_S, Mailbox, within_the_timeout


@CheckpointEngineRegistry.register("ray")
class RayCheckpointEngine(CheckpointEngine):
    """One side of a transfer.

    Rank 0 of the trainer sends, and rollouts receive. The trainer's other ranks only take part in gathering the
    tensors.

    Args:
        bucket_size: no effect: each tensor is an object of the store.
        is_master: whether this is rank 0 of the trainer.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._mailbox: Any = None
        if is_master:
            # On the node of the sender, so that it lives as long as the weights.
            here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
            self._mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self._sends = False

    def prepare(self) -> dict[str, Any]:
        """Empty the mailbox, and return its handle."""
        if self._mailbox is not None:
            ray.get(self._mailbox.empty.remote(), timeout=TRANSFER_TIMEOUT_S)
        return {"mailbox": self._mailbox}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of :meth:`init_process_group`, by rank, for the trainer and for the rollouts."""
        mailbox = metadata[0]["mailbox"]
        actors = {
            "mailbox": [mailbox] * actor_wg_world_size,
            "sends": [rank == 0 for rank in range(actor_wg_world_size)],
        }
        rollouts = {"mailbox": [mailbox] * rollout_world_size, "sends": [False] * rollout_world_size}
        return actors, rollouts

    def init_process_group(self, mailbox: Any, sends: bool) -> None:  # type: ignore[override]
        """Store the mailbox, and whether this rank sends."""
        self._mailbox = mailbox
        self._sends = sends

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send full tensors. Every rank iterates over all weights, because gathering a tensor is a collective."""
        sent: list[tuple[str, Any]] = []
        for name, tensor in weights:
            if self._sends:
                sent.append((name, ray.put(tensor.detach().to("cpu"))))
        if self._sends:
            # In a list: Ray would replace a reference that is itself an argument by its object.
            await within_the_timeout(self._mailbox.put.remote(sent), "the mailbox did not take the weights")
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """Yield the name and the full tensor of each weight."""
        sent = await within_the_timeout(self._mailbox.get.remote(), "rank 0 of the trainer sent no weights")
        for name, tensor in sent:
            yield name, await within_the_timeout(tensor, f"{name} did not arrive")

    def finalize(self) -> None:
        """Do nothing: the mailbox keeps the weights until the next transfer."""
