"""The trainer mode ``reward_pipeline``: training goes on while rewards are still being judged.

*Mini-batch pipeline*: the trainer updates on the groups whose rewards are in, while the others are judged. *One-step
off-policy*: the rollout of the next step runs while the rewards of this one come in; every update then trains on what
the weights before the last update generated. Each works alone or with the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.debug import marked_timer

from reward_loop.verl.agent_loop import GENERATED
from reward_loop.verl.options import PIPELINE_MODE, pipeline_options
from reward_loop.verl.trainer import NothingToLearnError

__all__ = ["AGENT_LOOP_MANAGER", "RewardPipelineTrainer"]

logger = logging.getLogger(__name__)

AGENT_LOOP_MANAGER = "reward_loop.verl.agent_loop.PipelineAgentLoopManager"
"""What publishes trajectories before their rewards are in."""

MINI_BATCH_ESTIMATORS = frozenset({"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo"})
"""Estimators that look at nothing outside a sample's group. The others whiten, or count, over the whole batch."""

MASKS = ("response_mask", "loss_mask")

POLL_S = 0.05
"""Seconds between two looks at TransferQueue while something is awaited."""

SLOWER_THAN_POLL = 10
"""A look at a large queue takes a while: the pause is this many times as long, at least."""

REPORT_S = 60.0
"""Seconds of waiting after which the log says for what."""


@register_trainer(PIPELINE_MODE)
class RewardPipelineTrainer(PPOTrainerSync):
    """verl's synchronous, colocated trainer, with the order of a step changed."""

    def __init__(self, config: DictConfig) -> None:
        self.options = pipeline_options(config)
        with open_dict(config):
            # verl compares the name: buffer and loader are to be the synchronous ones.
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        self._submitted: list[list[str]] = []
        """The uids of the batches that were handed to the rollout and not trained on, oldest first."""

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.options.one_step_off_policy:
            # Any name but "sync" makes verl keep prompts in flight in its checkpoints.
            self.trainer_mode = PIPELINE_MODE

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        prompts, trajectories = self._look()
        done = {uid for uid, tag in prompts.items() if tag["status"] == "finished"}
        stale = [key for key in trajectories if key.split("_")[0] not in prompts]
        if stale:
            # The checkpoint was written before its own batch was cleared.
            tq.kv_clear(keys=stale, partition_id="train")
        again = [uid for uid in prompts if uid not in done]
        if again:
            # They are generated once more, so that what they were tagged with is no longer true.
            tq.kv_batch_put(keys=again, partition_id="train", tags=[{GENERATED: False} for _ in again])
        if prompts:
            self._submitted = [list(prompts)]

    def _submit(self) -> None:
        batch = self._next_train_batch()
        self._submit_batch_to_rollout(batch)
        self._submitted.append(list(batch["uid"]))

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """One training step."""
        step_began = time.monotonic()
        last = self.global_steps >= self.total_training_steps
        ahead = self.options.one_step_off_policy and not last
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()
            while len(self._submitted) < 1 + ahead:
                self._submit()
            waiting_for = [uid for uids in self._submitted for uid in uids]
            self._wait("generation", lambda prompts: all(map(_is_generated, map(prompts.get, waiting_for))))
            self.on_sample_end()
        uids = self._submitted.pop(0)
        batch = self._balance_batch(self._trajectories(uids), metrics=metrics)
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        whole = _copy(batch)
        self._forward(batch, metrics, timing_raw)

        aggregator = MetricsAggregator()
        waited = 0.0
        updates, empty = 0, None
        for rows, seconds in self._complete_parts(whole, uids, timing_raw):
            waited += seconds
            part_metrics: dict = {}
            try:
                self._train(rows, part_metrics, timing_raw)
            except NothingToLearnError as error:
                empty = error
                _zero(rows.keys, "advantages", "returns", *MASKS)
                continue
            updates += 1
            aggregator.add_step_metrics(part_metrics, sample_count=len(rows))
        if empty is not None and not updates:
            raise empty
        metrics.update(aggregator.get_aggregated_metrics())
        tq.kv_clear(keys=uids, partition_id="train")
        metrics["reward_pipeline/update_calls"] = updates
        metrics["reward_pipeline/waiting_for_rewards_s"] = waited
        metrics["reward_pipeline/waiting_share"] = waited / max(time.monotonic() - step_began, 1e-9)
        metrics["reward_pipeline/off_policy_steps"] = self._staleness(whole)
        return whole

    def _forward(self, batch: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        """The passes that need no reward, over the whole batch."""
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            self._compute_old_log_prob(_copy(batch), metrics=metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                self._compute_ref_log_prob(_copy(batch), metrics=metrics)
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                self._compute_values(_copy(batch), metrics=metrics)

    def _train(self, rows: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        """Advantage and updates for some of the mini-batches of a step."""
        with _added_timer("adv", timing_raw):
            self._compute_advantage(_copy(rows), metrics=metrics)
        if self.use_critic:
            with _added_timer("update_critic", timing_raw):
                self._update_critic(_copy(rows), metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with _added_timer("update_actor", timing_raw):
                self._update_actor(_copy(rows), metrics=metrics)

    def _complete_parts(
        self, whole: KVBatchMeta, uids: list[str], timing_raw: dict
    ) -> Iterator[tuple[KVBatchMeta, float]]:
        """The batch in parts of whole mini-batches, each as soon as its rewards are in, with the seconds waited."""
        groups: dict[str, list[int]] = {uid: [] for uid in uids}
        padding = []
        for position, (key, tag) in enumerate(zip(whole.keys, whole.tags, strict=True)):
            if tag.get("is_padding"):
                padding.append(position)
            else:
                groups[key.split("_")[0]].append(position)
        n = self.config.actor_rollout_ref.rollout.n
        even = not padding and all(len(rows) == n for rows in groups.values())
        by_mini_batch = (
            self.options.mini_batch_pipeline and even and self.config.algorithm.adv_estimator in MINI_BATCH_ESTIMATORS
        )
        multiple = self._get_required_batch_multiple(1) // n if by_mini_batch else len(uids)
        left = dict(groups)
        while left:
            began = time.monotonic()
            wanted = min(multiple, len(left))
            prompts = self._wait_for_groups(left, wanted)
            waited = time.monotonic() - began
            timing_raw["wait_reward"] = timing_raw.get("wait_reward", 0.0) + waited
            over = [uid for uid in left if _is_over(prompts.get(uid))]
            over = over[: len(over) // wanted * wanted]
            positions = sorted(position for uid in over for position in left.pop(uid))
            if not left:
                positions += padding
            failed = [uid for uid in over if prompts[uid]["status"] == "failure"]
            part = _select(whole, positions)
            self._fill_in(part, failed)
            yield self._balance_batch(part, metrics={}), waited

    def _fill_in(self, part: KVBatchMeta, failed: list[str]) -> None:
        """Gives the rows that will have no reward a zero one, and leaves them out of training."""
        rows = [
            key
            for key, tag in zip(part.keys, part.tags, strict=True)
            if tag.get("is_padding") or key.split("_")[0] in failed
        ]
        _zero(rows, "rm_scores", *MASKS)

    def _trajectories(self, uids: list[str]) -> KVBatchMeta:
        wanted = set(uids)
        _, trajectories = self._look()
        rows = {key: tag for key, tag in trajectories.items() if key.split("_")[0] in wanted}
        if not rows:
            raise RuntimeError("not one rollout of the batch was generated: see the errors of the agent loop workers")
        return KVBatchMeta(partition_id="train", keys=list(rows), tags=list(rows.values()))

    def _staleness(self, batch: KVBatchMeta) -> float:
        """How many updates the weights had seen, at the most, between a trajectory's generation and now."""
        versions = [tag["min_global_steps"] for tag in batch.tags if not tag.get("is_padding")]
        return float(max(self.global_steps - 1 - version for version in versions))

    def _look(self) -> tuple[dict[str, dict], dict[str, dict]]:
        """The tags of the prompts and of the trajectories that are in TransferQueue."""
        items = (tq.kv_list("train") or {}).get("train", {})
        prompts = {key: tag for key, tag in items.items() if tag.get("is_prompt")}
        return prompts, {key: tag for key, tag in items.items() if key not in prompts}

    def _wait_for_groups(self, uids: Collection[str], count: int) -> dict[str, dict]:
        return self._wait("rewards", lambda prompts: sum(_is_over(prompts.get(uid)) for uid in uids) >= count)

    def _wait(self, what: str, arrived: Callable[[dict[str, dict]], bool]) -> dict[str, dict]:
        """Looks at the prompts until ``arrived`` says yes. A reward has its own deadline; generation is verl's."""
        report = time.monotonic() + REPORT_S
        while True:
            began = time.monotonic()
            prompts, _ = self._look()
            if arrived(prompts):
                return prompts
            now = time.monotonic()
            if now > report:
                statuses = [tag["status"] for tag in prompts.values()]
                counts = {status: statuses.count(status) for status in sorted(set(statuses))}
                logger.info("still waiting for %s: prompts are %s", what, counts)
                report = now + REPORT_S
            time.sleep(max(POLL_S, SLOWER_THAN_POLL * (now - began)))


def _zero(keys: list[str], *fields: str) -> None:
    """Writes zeros, one for each token of the response, to fields of some rows."""
    if not keys:
        return
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["response_mask"])
    masks = data["response_mask"].unbind()
    zeros = {
        field: torch.nested.as_nested_tensor(
            [mask.new_zeros(mask.shape, dtype=None if field in MASKS else torch.float32) for mask in masks],
            layout=torch.jagged,
        )
        for field in fields
    }
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(zeros, batch_size=len(keys)))


def _is_generated(tag: dict | None) -> bool:
    return tag is not None and (bool(tag.get(GENERATED)) or _is_over(tag))


def _is_over(tag: dict | None) -> bool:
    return tag is not None and tag["status"] in ("finished", "failure")


def _copy(batch: KVBatchMeta) -> KVBatchMeta:
    """verl adds to the ``extra_info`` of what it is given, and remembers fields that only some rows have."""
    return KVBatchMeta(
        partition_id=batch.partition_id, keys=list(batch.keys), tags=list(batch.tags), extra_info=dict(batch.extra_info)
    )


def _select(batch: KVBatchMeta, positions: list[int]) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[i] for i in positions],
        tags=[batch.tags[i] for i in positions],
        extra_info=dict(batch.extra_info),
    )


@contextmanager
def _added_timer(name: str, timing_raw: dict) -> Iterator[None]:
    """``marked_timer`` for what runs several times a step: seconds add up."""
    began = time.monotonic()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began
