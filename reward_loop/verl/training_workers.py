"""verl's training workers, with a learning-rate schedule that moves on when the trainer says so.

verl moves it on at the end of every update call, of which a step has several when it trains on mini-batches as their
rewards come in. A schedule counts training steps.
"""

from __future__ import annotations

from typing import Any

from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

__all__ = ["PipelineActorWorker", "PipelineTrainingWorker"]


class PipelineTrainingWorker(TrainingWorker):
    """Trains without moving the schedule on. The critic, and what is inside the actor."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: Any) -> Any:
        """One optimizer step."""
        tu.assign_non_tensor(data, update_lr_scheduler=False)
        return super().train_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lr_scheduler_step(self) -> float:
        """Moves the schedule on by one training step; returns the learning rate of the next one."""
        return self.engine.lr_scheduler_step()


class PipelineActorWorker(ActorRolloutRefWorker):
    """verl's actor, rollout and reference policy."""

    actor_worker_cls = PipelineTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lr_scheduler_step(self) -> float:
        """Moves the actor's schedule on by one training step; returns the learning rate of the next one."""
        return self.actor.lr_scheduler_step()
