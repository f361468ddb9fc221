"""verl's V1 trainer with rewards from the reward loop, for every trainer mode."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from tensordict import NonTensorStack, TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import assign_non_tensor_stack

from reward_loop.errors import RewardLoopError
from reward_loop.types import Reward
from reward_loop.verl.colocated import ColocatedRewardModel
from reward_loop.verl.gdpo import GDPO, component_rewards, switch_estimator, use_rewards
from reward_loop.verl.mode_options import poll_interval, stall_timeout
from reward_loop.verl.replay_buffer import extend
from reward_loop.verl.resolve import without_reward
from reward_loop.verl.reward_metrics import (
    StepRewards,
    added_seconds,
    final_outputs,
    session_of,
    spread,
    unmasked,
    validation_metrics,
)
from reward_loop.verl.router_address import RouterAddress
from reward_loop.verl.token_rewards import has_parts, misfit, place
from reward_loop.verl.tq_batches import MASKS, copy, select, zero
from reward_loop.verl.training_workers import masking
from reward_loop.verl.workers import RewardClient, RewardWorkers

__all__ = ["NothingToLearnError", "with_reward_loop"]

logger = logging.getLogger(__name__)

GROUP_ESTIMATORS = frozenset(
    {
        *("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"),
        *("reinforce_plus_plus_baseline", GDPO),
    }
)
"""verl's advantage estimators that compute a sample's baseline from its group."""

RAW_SCORE = "raw_score"
"""Key of a trajectory's ``extra_fields``: its score before ``post_process_scores``. Only groups that have been
post-processed have it."""

AGENT_OUTPUT = frozenset({"prompts", "responses", "input_ids", "position_ids", "num_turns", "extra_fields"})
"""Columns of an agent loop's output that a reward worker receives."""

NOT_FOR_REWARDS = frozenset(AgentLoopOutput.model_fields).union(
    ("loss_mask", "rollout_log_probs", "rm_scores", "multi_modal_inputs", "teacher_ids", "teacher_logprobs")
)
"""Columns that an agent loop writes; all other columns come from the data set. Of these, only `AGENT_OUTPUT` is
fetched, because images and routed experts are large."""


class NothingToLearnError(RewardLoopError):
    """No sample of an update has a score to learn from."""


class _RewardLoop:
    """The part of verl's reward loop manager that verl's trainer uses."""

    def __init__(self, workers: RewardWorkers, inside_rollout: bool) -> None:
        self.workers = workers
        self.reward_loop_worker_handles: list[RewardClient] | None = [workers.client] if inside_rollout else None


class _WithGroupSize:
    """A data loader that adds the column ``group_size``, the number of rollouts of each row.

    Reward managers that score whole groups need it.
    """

    def __init__(self, loader: Any, n: int) -> None:
        self._loader = loader
        self._n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {**batch, "group_size": np.array(_group_sizes(batch, self._n), dtype=object)}

    def __len__(self) -> int:
        return len(self._loader)


def _group_sizes(batch: Any, n: int) -> list[int]:
    """Returns the number of rollouts of each row: verl's column ``__rollout_n__`` if it exists, else ``n``."""
    sizes = batch.get("__rollout_n__", None)
    return [n] * len(batch["raw_prompt"]) if sizes is None else [int(size) for size in sizes]


class RewardLoopTrainer(PPOTrainer):
    """Overrides of verl's trainer. Mixed in before the class of a trainer mode by :func:`with_reward_loop`.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.resolve.settle`.
        reward_router_address: the address of the router in front of the reward models, if there is one.
        colocated: the reward model on this trainer's GPUs, which the trainer starts itself.
    """

    def __init__(
        self,
        config: DictConfig,
        reward_router_address: RouterAddress | str | None,
        colocated: ColocatedRewardModel | None = None,
    ) -> None:
        self._full_config = config
        self._reward_router_address = reward_router_address
        self._colocated = colocated
        self._pending_rewards: tuple[list[str], list[Any]] | None = None
        self._rewards = StepRewards()
        """The rewards of the current step."""
        self._part: Any = None
        """The rows of the latest call of `_compute_advantage`."""
        config = without_reward(config)
        switch_estimator(config)
        super().__init__(config)
        # verl replaces failed groups indefinitely, even if every replacement fails for the same reason.
        self.replay_buffer.checks.append(self._look_at_workers)

    def _build_replay_buffer(self) -> Any:
        stall_timeout_s, stall_option = stall_timeout(self._full_config)
        return extend(
            super()._build_replay_buffer(),
            poll_interval_s=poll_interval(self._full_config),
            stall_timeout_s=stall_timeout_s,
            stall_option=stall_option,
            post_process=self._post_process,
        )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(masking(worker.__ray_actor_class__))

    def _setup(self) -> None:
        if self._colocated is None:
            # Start them first: they load while the policy loads.
            self.reward_workers = RewardWorkers(self._full_config, self._reward_router_address)
        super()._setup()
        if self._colocated is not None:
            # The rollout sleeps now, so the free GPU memory is the same as during judging.
            pool = self.resource_pool_manager.get_resource_pool(Role.RewardModel)
            address = self._colocated.start(pool.get_placement_groups(device_name=self.config.trainer.device))
            self.reward_workers = RewardWorkers(self._full_config, address)
        self.reward_workers.wait_until_ready()
        self._post_processes = self.reward_workers.have_post_process()
        inside_rollout = self._full_config.reward_model.use_reward_loop and self._colocated is None
        self.reward_loop_manager = _RewardLoop(self.reward_workers, inside_rollout)
        if self.reward_workers.client.by_group:
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            self.val_dataloader: Any = _WithGroupSize(self.val_dataloader, n)

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        if self.reward_workers.client.by_group:
            assign_non_tensor_stack(batch, "group_size", _group_sizes(batch, self.config.actor_rollout_ref.rollout.n))
        return batch

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains, and then stops the agent loop workers.

        Rollouts for later steps may still be judged at the end. They would fail when the limiter of the job stops with
        this process.
        """
        super().fit(agent_loop_manager)
        for worker in agent_loop_manager.agent_loop_workers:
            ray.kill(worker)

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        """Runs one training step, and adds the metrics of its rewards, computed from all samples of the step."""
        self._rewards = StepRewards()
        with self._told_by_workers():
            batch = super().step(metrics, timing_raw)
        metrics.update(self._rewards.metrics())
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        """Runs one of verl's local updates. An update is skipped if none of its samples has a score.

        Raises:
            NothingToLearnError: this is the last update of the step, and no sample of the whole step has a score.
        """
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except NothingToLearnError as error:
            if self.local_trigger_step == self.parameter_sync_step - 1 and not self._rewards.trained:
                raise
            logger.warning("update %d of the step is left out: %s", self.local_trigger_step + 1, error)
            zero(self._part.keys, *self._advantage_fields(), *MASKS, partition_id=self._part.partition_id)
            return self._part

    def _validate(self) -> dict[str, float]:
        with self._told_by_workers():
            return super()._validate()

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: Any,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        verls = super()._val_metrics_update
        return validation_metrics(
            verls, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts
        )

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, list], dump_path: str
    ) -> None:
        """Writes rollouts to a file, with ``None`` as the score of masked samples."""
        infos = dict(reward_extra_infos_dict)
        scores = unmasked(scores, infos.get("reward_masked"))
        if "reward" in infos:
            infos["reward"] = unmasked(infos["reward"], infos.get("reward_masked"))
        super()._dump_generations(inputs, outputs, gts, scores, infos, dump_path)

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        # In verl's own values of these metrics, masked samples count as 0.
        metrics.update(self._trained_rewards(batch.partition_id))

    def _trained_rewards(self, partition_id: str) -> dict[str, float]:
        """Returns verl's metrics of scores and rewards, over the samples that have an advantage."""
        keys = final_outputs(self._rewards.trained)
        if not keys:
            return {}
        fields = {"critic/score": "rm_scores", "critic/rewards": "rm_scores"}
        if self.config.algorithm.use_kl_in_reward:
            fields["critic/rewards"] = "token_level_rewards"
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=sorted(set(fields.values())))
        metrics: dict[str, float] = {}
        for name, column in fields.items():
            metrics |= spread(name, [float(row.sum()) for row in data[column].unbind()])
        return metrics

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._ask_workers()

    def _look_at_workers(self) -> None:
        self.reward_workers.look_for_fatal_error()

    def _ask_workers(self) -> None:
        if self._full_config.trainer.v1.trainer_mode == "sync":
            self.reward_workers.raise_fatal_error()
        else:
            self.reward_workers.ask_for_fatal_error()  # samples of other prompts may be in flight

    @contextmanager
    def _told_by_workers(self) -> Iterator[None]:
        """Raises the fatal error of a reward worker, if there is one, when the block ends or fails.

        verl drops groups that failed; when all failed, it raises an error that does not mention the reward.
        """
        try:
            yield
        except Exception as error:
            self._ask_workers()
            if isinstance(error, RayActorError):
                raise RewardLoopError(f"a process of the run died, and what it was at with it: {error}") from error
            raise
        self._ask_workers()

    def _compute_reward_colocate(self, batch: Any, metrics: dict | None = None) -> Any:
        """Scores the whole batch after the rollout: if ``use_reward_loop=False``, or with a colocated reward model."""
        keys, rows = _session_rows(batch)
        if self._colocated is not None:
            # Not in `metrics`: verl would average these seconds over the parts of a step, not add them.
            with self._colocated.awake(None if metrics is None else self._rewards.seconds):
                rewards = self.reward_workers.finish_batch(self.reward_workers.start_batch(rows))
            _write_rewards(batch, keys, rewards)
            return batch
        pending = self.reward_workers.start_batch(rows)
        in_background = self._full_config.reward_model.launch_reward_fn_async and batch.partition_id == "train"
        if in_background:
            self._pending_rewards = (keys, pending)
        else:
            _write_rewards(batch, keys, self.reward_workers.finish_batch(pending))
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        self._part = copy(batch)
        if self._pending_rewards is not None:
            keys, pending = self._pending_rewards
            self._pending_rewards = None
            with self._apart_from_advantage("wait_reward"):
                rewards = self.reward_workers.finish_batch(pending)
            _write_rewards(batch, keys, rewards)
        infos, raw_scores = _reward_infos(batch)
        changed = self._reject_parts(batch, infos)  # before `post_process_scores` compares the scores of a group
        if self._post_processes:
            with self._apart_from_advantage("post_process"):
                self._post_process(batch)
        if changed or self._post_processes:
            infos, raw_scores = _reward_infos(batch)
        _place_parts(batch, infos)
        self._rewards.add(infos, raw_scores)
        masked = {key for key, info in infos.items() if info.get("reward_masked")}
        if self.config.algorithm.adv_estimator in GROUP_ESTIMATORS:
            masked |= _without_baseline(infos, masked)
        learning = [i for i, key in enumerate(batch.keys) if key in infos and key not in masked]
        if not learning:
            info = next(info for info in infos.values() if info.get("reward_masked"))
            raise NothingToLearnError(
                f"no sample of step {self.global_steps} has a score to learn from; the first one is "
                f"{info['reward_outcome']}{': ' if info['reward_error'] else ''}{info['reward_error']}"
            )
        rows = select(batch, learning)
        with ExitStack() as stack:
            if self.config.algorithm.adv_estimator == GDPO:
                names = self.config.algorithm.gdpo_reward_keys
                stack.enter_context(use_rewards(component_rewards(rows.keys, infos, names)))
            super()._compute_advantage(rows, metrics)
        learned = {batch.keys[i] for i in learning}
        self._rewards.trained |= learned
        zero(
            [key for key in batch.keys if key not in learned],
            *(*self._advantage_fields(), *MASKS),
            partition_id=batch.partition_id,
        )
        return copy(batch)

    def _advantage_fields(self) -> list[str]:
        """Returns the fields that verl writes with the advantage, apart from the masks.

        Rows without an advantage need zeros in these fields, because verl reads only fields that all rows have.
        """
        fields = ["advantages", "returns"]
        if self.config.algorithm.use_kl_in_reward:
            fields.append("token_level_rewards")
        correction = self.config.algorithm.get("rollout_correction")
        if (
            correction is not None
            and correction.get("rollout_is") is not None
            and not correction.get("bypass_mode")
            and self.config.actor_rollout_ref.rollout.calculate_log_probs
        ):
            fields.append("rollout_is_weights")
        return fields

    @contextmanager
    def _apart_from_advantage(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to verl's timing ``name``, and subtracts them from the timing ``adv``."""
        seconds: dict[str, float] = {}
        with added_seconds(name, seconds):
            yield
        self.timing_raw[name] = self.timing_raw.get(name, 0.0) + seconds[name]
        self.timing_raw["adv"] = self.timing_raw.get("adv", 0.0) - seconds[name]

    def _reject_parts(self, batch: Any, infos: Mapping[str, dict[str, Any]]) -> bool:
        """Turns samples into failed samples if their ``turn_level_scores`` or ``token_level_scores`` do not fit.

        All outputs of such a session get the new reward. Returns whether there was any.
        """
        keys = _keys_with_parts(infos)
        if not keys:
            return False
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        masks = data["response_mask"].unbind()
        problems = {key: misfit(mask, infos[key]) for key, mask in zip(keys, masks, strict=True)}
        rejected = {key: problem for key, problem in problems.items() if problem is not None}
        rewards = [Reward(reward_score=0.0, reward_extra_info=infos[key]) for key in rejected]
        failed = self.reward_workers.reject(
            rewards, _names(rejected), list(rejected.values()), len(keys) - len(rejected)
        )
        if rejected:
            _write_rewards(batch, list(rejected), failed)
        return bool(rejected)

    def _post_process(self, batch: Any) -> None:
        """Replaces the rewards of each group with the results of the function's ``post_process_scores``.

        Groups that have been post-processed already stay as they are. Does nothing if the function has no such method.
        """
        if not self._post_processes:
            return
        keys, groups = _groups(batch)
        if not keys:
            return
        processed = self.reward_workers.post_process(groups, [_names(group) for group in keys])
        flat = [key for group in keys for key in group]
        raw_scores = {key: r["reward_score"] for key, r in zip(flat, [r for g in groups for r in g], strict=True)}
        _write_rewards(batch, flat, [reward for group in processed for reward in group], raw_scores)


def with_reward_loop(trainer: type[PPOTrainer]) -> type[RewardLoopTrainer]:
    """Returns a subclass of a mode's trainer that takes its rewards from the reward loop."""
    return type(f"RewardLoop{trainer.__name__}", (RewardLoopTrainer, trainer), {})


def _session_rows(batch: Any) -> tuple[list[str], list[DataProto]]:
    """Returns the rollouts of a batch in the form in which the agent loop sends them to a reward worker.

    Returns:
        The key of each session's last output; and a ``DataProto`` for each session, with one row per output.
    """
    sessions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for position, key in enumerate(batch.keys):
        session, index = session_of(key)
        sessions[session].append((index, position))
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_reward_columns(batch))
    tensors = {name: list(data[name].unbind()) for name in ("prompts", "responses", "input_ids", "position_ids")}
    others = {
        name: list(data[name])
        for name in data.keys()  # noqa: SIM118  iterating a TensorDict goes over its rows
        if not isinstance(data.get(name), torch.Tensor)
    }
    keys, rows = [], []
    for outputs in sessions.values():
        positions = [position for _, position in sorted(outputs)]
        keys.append(batch.keys[positions[-1]])
        rows.append(_row(tensors, others, positions))
    return keys, rows


def _reward_columns(batch: Any) -> list[str]:
    """Returns the columns that a reward worker receives: those of the data set, and `AGENT_OUTPUT`."""
    # TransferQueue returns the names of the columns after a write. This write changes nothing.
    written = tq.kv_batch_put(keys=batch.keys[:1], partition_id=batch.partition_id, tags=batch.tags[:1])
    return [name for name in written.fields if name in AGENT_OUTPUT or name not in NOT_FOR_REWARDS]


def _row(tensors: dict[str, list[torch.Tensor]], others: dict[str, list[Any]], positions: Sequence[int]) -> DataProto:
    padded = {name: pad_sequence([values[p] for p in positions], batch_first=True) for name, values in tensors.items()}
    padded["attention_mask"] = pad_sequence(
        [torch.ones_like(tensors["input_ids"][p]) for p in positions], batch_first=True
    )
    columns = {name: _objects(values[p] for p in positions) for name, values in others.items()}
    columns["__num_turns__"] = columns.pop("num_turns", _objects(None for _ in positions))
    columns["response_len"] = _objects(len(tensors["responses"][p]) for p in positions)
    columns["tool_extra_fields"] = columns.pop("extra_fields", _objects({} for _ in positions))
    return DataProto(batch=TensorDict(padded, batch_size=len(positions)), non_tensor_batch=columns)


def _objects(values: Iterable[Any]) -> np.ndarray:
    items = [getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value for value in values]
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def _names(keys: Iterable[str]) -> list[str]:
    """Returns the names that the samples of these keys have in messages and records: ``{uid}_{session}``."""
    return [session_of(key)[0] for key in keys]


def _groups(batch: Any) -> tuple[list[list[str]], list[list[Reward]]]:
    """Returns the groups of a batch that have not been post-processed.

    Returns:
        For each group, the keys of its sessions' last outputs, and their rewards, both in the order of the sessions.
    """
    rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for key in final_outputs(rows):
        group, number = session_of(key)[0].rsplit("_", 1)
        members[group].append((int(number), key))
    keys = [[key for _, key in sorted(group)] for group in members.values()]
    flat = [key for group in keys for key in group]
    if not flat:
        return [], []
    data = tq.kv_batch_get(keys=flat, partition_id=batch.partition_id, select_fields=["rm_scores", "extra_fields"])
    extra_fields = [getattr(extra, "data", extra) for extra in data["extra_fields"]]
    rewards = {
        key: Reward(reward_score=float(scores.sum()), reward_extra_info=extra.get("reward_extra_info") or {})
        for key, scores, extra in zip(flat, data["rm_scores"].unbind(), extra_fields, strict=True)
        if RAW_SCORE not in extra
    }
    keys = [group for group in keys if all(key in rewards for key in group)]
    return keys, [[rewards[key] for key in group] for group in keys]


def _write_rewards(
    batch: Any, keys: Sequence[str], rewards: Sequence[Reward], raw_scores: Mapping[str, float] | None = None
) -> None:
    """Writes the rewards of some sessions to TransferQueue: at the last token of all their outputs, as verl does.

    Args:
        batch: a batch with all outputs of the sessions; rows of other sessions stay as they are.
        keys: the key of one output of each session.
        rewards: the reward of each session.
        raw_scores: the scores before ``post_process_scores``, by key, if the rewards are its results.
    """
    by_session = {session_of(key)[0]: reward for key, reward in zip(keys, rewards, strict=True)}
    raw = {session_of(key)[0]: {RAW_SCORE: score} for key, score in (raw_scores or {}).items()}
    # Padding rows are copies of other rows: skip them.
    rows = [
        key
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if not tag.get("is_padding") and session_of(key)[0] in by_session
    ]
    data = tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=["responses", "extra_fields"])
    scores, extra_fields = [], []
    for key, response, extra in zip(rows, data["responses"].unbind(), list(data["extra_fields"]), strict=True):
        reward = by_session[session_of(key)[0]]
        score = torch.zeros(len(response), dtype=torch.float32)
        score[-1:] = reward["reward_score"]
        scores.append(score)
        extra = getattr(extra, "data", extra)
        raw_score = raw.get(session_of(key)[0], {})
        extra_fields.append({**extra, **raw_score, "reward_extra_info": reward["reward_extra_info"]})
    fields = TensorDict(
        {
            "rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged),
            "extra_fields": NonTensorStack(*extra_fields),
        },
        batch_size=len(rows),
    )
    tq.kv_batch_put(keys=rows, partition_id=batch.partition_id, fields=fields)


def _reward_infos(batch: Any) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Returns ``reward_extra_info``, and the score before ``post_process_scores``, by key of the trajectory.

    Padding rows are left out.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    if not keys:
        return {}, {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields", "rm_scores"])
    extra_fields = [getattr(value, "data", value) for value in data["extra_fields"]]
    infos = {key: extra.get("reward_extra_info") or {} for key, extra in zip(keys, extra_fields, strict=True)}
    raw_scores = {
        key: extra.get(RAW_SCORE, float(scores.sum()))
        for key, extra, scores in zip(keys, extra_fields, data["rm_scores"].unbind(), strict=True)
    }
    return infos, raw_scores


def _place_parts(batch: Any, infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Distributes rewards over turns and tokens where the function returned scores for them."""
    keys = _keys_with_parts(infos)
    if not keys:
        return
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores", "response_mask"])
    rows = zip(keys, data["rm_scores"].unbind(), data["response_mask"].unbind(), strict=True)
    placed = [place(float(scores.sum()), mask, infos[key]) for key, scores, mask in rows]
    fields = TensorDict({"rm_scores": torch.nested.as_nested_tensor(placed, layout=torch.jagged)}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)


def _keys_with_parts(infos: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the last outputs of unmasked sessions with ``turn_level_scores`` or ``token_level_scores``."""
    last = {session_of(key)[0]: key for key in sorted(infos, key=session_of)}
    return [key for key in last.values() if has_parts(infos[key]) and not infos[key].get("reward_masked")]


def _without_baseline(keys: Collection[str], masked: set[str]) -> set[str]:
    """Returns the trajectories of sessions that are the only unmasked one of their group.

    verl uses the baseline 0 for a group of one, so their raw score would become the advantage. Groups that had one
    session from the start are not returned.
    """
    members: dict[str, set[str]] = defaultdict(set)
    left: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        session, _ = session_of(key)
        group = session.rsplit("_", 1)[0]
        members[group].add(session)
        if key not in masked:
            left[group].add(session)
    lone = {next(iter(sessions)) for group, sessions in left.items() if len(sessions) == 1 < len(members[group])}
    return {key for key in keys if session_of(key)[0] in lone}
