"""Registers the CPU platform, rollout and engines. verl imports it in every process of a CPU run.

The environment variable ``VERL_USE_EXTERNAL_MODULES`` names this module.
"""

from __future__ import annotations

import os

from verl.plugin.platform.platform_manager import PlatformRegistry

from reward_loop.verl.compat import uses
from reward_loop.verl.cpu.platform import CPUPlatform

uses(__name__, "verl.plugin.platform.platform_manager:PlatformRegistry", "register(platform)")
uses(__name__, "verl.workers.rollout.base", "_ROLLOUT_REGISTRY")
uses(__name__, "verl.workers.rollout.replica:RolloutReplicaRegistry", "register(name, loader)")

ROLLOUT_NAME = "transformers"
"""``actor_rollout_ref.rollout.name`` of the CPU rollout."""


def _register_rollout() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    def load() -> type[RolloutReplica]:
        from reward_loop.verl.cpu.rollout import CPUReplica

        return CPUReplica

    RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
    # verl has no register function for this table.
    base._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "reward_loop.verl.cpu.rollout.ServerAdapter"


def _prepare_training_worker() -> None:
    import torch.distributed

    # verl would request "cpu:gloo,cpu:gloo", which torch rejects. It keeps an existing process group.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend="cpu:gloo",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=os.environ.get("DIST_INIT_METHOD") or _meeting_place(),
        )
    import reward_loop.verl.cpu.engine  # noqa: F401  registers the engines


def _meeting_place() -> str:
    """Returns the URL through which the ranks of this worker group find each other.

    On one node, this is a file. A port is less safe, since another program may have taken MASTER_PORT since verl chose
    it; but ranks on several nodes have no common file.
    """
    if int(os.environ["WORLD_SIZE"]) > int(os.environ["RAY_LOCAL_WORLD_SIZE"]):
        return "env://"
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    return f"file://{session}/reward-loop-{os.environ['WG_PREFIX']}-{os.environ['MASTER_PORT']}"


PlatformRegistry.register(platform="cpu")(CPUPlatform)
_register_rollout()
if os.environ.get("WG_BACKEND") == "ray":  # verl sets it only in training workers
    _prepare_training_worker()
