"""verl's training workers, with masked rows removed from every loss.

verl multiplies the loss of a masked row by zero, but the row still has an effect:

- *In the denominator.* verl divides the losses ``seq-mean-*`` by the configured number of rows, and some losses by the
  rows or the longest response of a micro-batch. Here, the rows without a token in ``loss_mask`` are removed before
  the loss is computed, and the number of rows is the number of those that remain, over all data-parallel ranks.
- *In the optimizer.* A gradient of zero still moves the weights: AdamW adds its momentum and the weight decay. Here, a
  mini-batch in which no row of any rank has a token in ``response_mask`` makes no optimizer step.

verl's own rejection sampling clears only ``response_mask``: rows that it rejects stay in the denominator, as in verl.

The workers of the mode ``reward_pipeline`` also advance the learning-rate schedule only when the trainer asks for it.
verl advances the schedule at the end of every update call; that mode makes several calls in a training step, but a
schedule counts training steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

__all__ = ["MaskingTrainingWorker", "PipelineActorWorker", "PipelineTrainingWorker", "masking", "without_masked_rows"]

SKIPPED_SHARE = "skipped_share"
"""The metrics ``actor/skipped_share`` and ``critic/skipped_share``: the share of mini-batches without an optimizer
step."""


class MaskingTrainingWorker(TrainingWorker):
    """Trains on the rows that are not masked. Used as the critic, and as the training part of the actor's worker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        """Sets the loss, which receives no masked rows."""
        super().set_loss_fn(partial(without_masked_rows, loss_fn))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: Any) -> Any:
        """Trains on a batch in mini-batches, as verl does."""
        output = super().train_mini_batch(data)
        if output is not None:
            # verl reads this metric after every update, even if all mini-batches were skipped.
            tu.get(output, "metrics").setdefault("mfu", [0.0])
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: Any) -> Any:
        """Makes one optimizer step on a mini-batch, or none if all its rows are masked on all ranks."""
        rows, tokens = self._learnable(data)
        if not (rows and tokens):
            return self._skip(data)
        if "global_batch_size" in data.keys():  # noqa: SIM118  iterating a TensorDict goes over its rows
            tu.assign_non_tensor(data, global_batch_size=rows)
        output = super().train_batch(data)
        if output is not None:
            tu.get(output, "metrics")[SKIPPED_SHARE] = 0.0
        return output

    def _learnable(self, data: Any) -> tuple[int, int]:
        """Returns the numbers of unmasked rows and of tokens in ``response_mask``, over all data-parallel ranks."""
        rows = len(_unmasked(data["loss_mask"]))
        counts = torch.tensor([rows, int(_values(data["response_mask"]).sum())], device=self.device_name)
        group = self.engine.get_data_parallel_group()
        # Every rank has the whole batch with dynamic context parallelism, and without a group (TorchTitan, if all ranks
        # are tensor-parallel): for torch, no group means all ranks.
        if group is not None and not getattr(self.engine_config, "dynamic_context_parallel", False):
            torch.distributed.all_reduce(counts, group=group)
        return int(counts[0]), int(counts[1])

    def _skip(self, data: Any) -> Any:
        metrics: dict[str, Any] = {SKIPPED_SHARE: 1.0}
        if tu.get(data, key="update_lr_scheduler", default=False):
            metrics["lr"] = self.engine.lr_scheduler_step()
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})


class PipelineTrainingWorker(MaskingTrainingWorker):
    """Trains without advancing the learning-rate schedule."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: Any) -> Any:
        """Makes one optimizer step."""
        tu.assign_non_tensor(data, update_lr_scheduler=False)
        return super().train_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lr_scheduler_step(self) -> float:
        """Advances the schedule by one training step; returns the learning rate of the next step."""
        return self.engine.lr_scheduler_step()


class PipelineActorWorker(ActorRolloutRefWorker):
    """verl's worker for actor, rollout and reference policy, with :class:`PipelineTrainingWorker` as the actor."""

    actor_worker_cls = PipelineTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lr_scheduler_step(self) -> float:
        """Advances the actor's schedule by one training step; returns the learning rate of the next step."""
        return self.actor.lr_scheduler_step()


def masking(worker: Any) -> Any:
    """Returns a subclass of one of verl's worker classes that excludes masked rows from training.

    Args:
        worker: a `TrainingWorker` class, or a worker class with such an ``actor_worker_cls``. Other classes, and
            classes that already exclude masked rows, are returned unchanged.
    """
    if issubclass(worker, MaskingTrainingWorker):
        return worker
    if issubclass(MaskingTrainingWorker, worker):
        return MaskingTrainingWorker
    if issubclass(worker, TrainingWorker):
        return type(worker.__name__, (MaskingTrainingWorker, worker), {})
    actor = getattr(worker, "actor_worker_cls", None)
    if actor is None or masking(actor) is actor:
        return worker
    return type(worker.__name__, (worker,), {"actor_worker_cls": masking(actor)})


def without_masked_rows(loss: Callable[..., Any], /, **arguments: Any) -> Any:
    """Calls one of verl's loss functions without the masked rows of a micro-batch.

    The loss receives all rows in three cases: no row is masked; all rows are masked, since every rank needs a backward
    pass; or the call only processes logits and has no outputs by row yet. The loss of a micro-batch whose rows are all
    masked is zero.

    Args:
        loss: a loss function of verl's engines.
        **arguments: its keyword arguments. ``model_output`` and ``data`` have one entry per row.
    """
    output, data = arguments.get("model_output"), arguments.get("data")
    if output is None or data is None or "loss_mask" not in data.keys():  # noqa: SIM118
        return loss(**arguments)
    rows = _unmasked(data["loss_mask"])
    if not rows and getattr(loss, "func", None) is distillation_ppo_loss:
        return _of_one_token(loss, arguments)
    if len(rows) in (0, len(data)):
        return loss(**arguments)
    selected = {name: _select(value, rows) for name, value in output.items()}
    return loss(**arguments | {"model_output": selected, "data": tu.index_select_tensor_dict(data, rows)})


def _of_one_token(loss: Callable[..., Any], arguments: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns a loss of zero, and the metrics of the first token.

    verl's distillation loss fails if no token of the micro-batch is unmasked: it logs the smallest loss of a token.
    """
    data = arguments["data"].copy()
    masks = [mask.clone() for mask in data["response_mask"].unbind()]
    masks[0][0] = 1
    nested = data["response_mask"].is_nested
    data["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged) if nested else torch.stack(masks)
    value, metrics = loss(**arguments | {"data": data})
    return value * 0, metrics


def _select(value: Any, rows: list[int]) -> Any:
    """Returns some rows of a model output that is a nested tensor. Other outputs have no rows and stay unchanged."""
    if not (isinstance(value, torch.Tensor) and value.is_nested):
        return value
    kept = value.unbind()
    return torch.nested.as_nested_tensor([kept[row] for row in rows], layout=torch.jagged)


def _unmasked(mask: torch.Tensor) -> list[int]:
    """Returns the indices of rows with a non-zero entry, in a mask of shape (rows, tokens)."""
    padded = mask.to_padded_tensor(0) if mask.is_nested else mask
    return padded.any(dim=1).nonzero().flatten().tolist()


def _values(mask: torch.Tensor) -> torch.Tensor:
    return mask.values() if mask.is_nested else mask
