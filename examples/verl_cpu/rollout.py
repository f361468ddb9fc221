"""verl's rollout on a CPU: one server per replica, and the adapter that sends it the weights."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from examples.verl_cpu.server import CPURewardServer, CPURolloutServer, within_the_timeout

BUCKET_BYTES = 64 * 2**20
"""Weights are sent through Ray's object store in buckets of at most this size; a larger tensor has its own bucket."""


def _server_name(replica_rank: int) -> str:
    return f"cpu_rollout_server_{replica_rank}"


class CPUReplica(RolloutReplica):
    """A replica with one server, on the node of its worker.

    The server of a rollout is a :class:`CPURolloutServer`, which receives the worker's weights; that of a reward model
    is a :class:`CPURewardServer`.
    """

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                "a replica on a CPU has no tensor, data or pipeline parallelism: set tensor_model_parallel_size=1 in "
                "actor_rollout_ref.rollout or reward_model.rollout"
            )
        node = await self.workers[0].__ray_call__.remote(lambda worker: ray.get_runtime_context().get_node_id())
        options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}
        path = copy_to_local(self.model_config.path)
        if self.is_reward_model:
            name = (self.config.engine_kwargs.get("transformers") or {}).get("served_model_name")
            server = (
                ray.remote(CPURewardServer)
                .options(name=f"cpu_reward_server_{self.replica_rank}{self.name_suffix}", **options)
                .remote(path, name)
            )
        else:
            options |= {"name": _server_name(self.replica_rank), "num_cpus": 1, "max_concurrency": self.max_concurrency}
            server = (
                ray.remote(CPURolloutServer)
                .options(**options)
                .remote(
                    model_path=path,
                    prompt_length=self.config.prompt_length,
                    response_length=self.config.response_length,
                    max_num_seqs=self.config.max_num_seqs,
                    seed=self.config.seed + self.replica_rank,
                )
            )
        self._server_address = await server.start.remote()
        self._server_handle = server
        self.servers = [server]


class ServerAdapter(BaseRollout):
    """The rollout in a training worker: sends the weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Send full tensors. Every rank iterates over all weights, because gathering a tensor is a collective."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"the CPU rollout supports only full tensors, not {wire_format!r}")
        if kwargs.get("peft_config") is not None:
            raise NotImplementedError(
                "the CPU rollout does not support LoRA adapters: set actor_rollout_ref.model.lora.merge=True"
            )
        if self._server is None:
            self._server = ray.get_actor(_server_name(self._replica_rank))
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if size and size + tensor.nbytes > BUCKET_BYTES:
                # Awaited: more buckets at a time might not fit into Ray's object store.
                await self._send(bucket, last=False, global_steps=None)
                bucket, size = {}, 0
            bucket[name] = tensor.detach().to("cpu", torch.float32)
            size += tensor.nbytes
        await self._send(bucket, last=True, global_steps=global_steps)

    async def _send(self, bucket: dict[str, torch.Tensor], **options: Any) -> None:
        what = f"{_server_name(self._replica_rank)} did not take {len(bucket)} tensors"
        await within_the_timeout(self._server.update_weights.remote(bucket, **options), what)

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: `release` releases nothing."""

    async def release(self) -> None:
        """Do nothing: there is no device memory."""
