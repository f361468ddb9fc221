"""verl's V1 trainer with rewards from the reward loop, in whatever mode it runs."""

from __future__ import annotations

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
from verl.protocol import DataProto
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import assign_non_tensor_stack

from reward_loop.errors import RewardLoopError
from reward_loop.types import RESERVED_KEYS, Outcome, Reward
from reward_loop.verl.colocated import ColocatedRewardModel
from reward_loop.verl.filtering import keep_groups_without_metric
from reward_loop.verl.gdpo import GDPO, component_rewards, switch_estimator, use_rewards
from reward_loop.verl.mode_options import stall_timeout
from reward_loop.verl.replay_buffer import Patience
from reward_loop.verl.resolve import without_reward
from reward_loop.verl.router_address import RouterAddress
from reward_loop.verl.token_rewards import has_parts, misfit, place
from reward_loop.verl.tq_batches import MASKS, copy, select, zero
from reward_loop.verl.training_workers import masking
from reward_loop.verl.workers import RewardClient, RewardWorkers

__all__ = ["NothingToLearnError", "with_reward_loop"]

GROUP_ESTIMATORS = frozenset(
    {
        *("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"),
        *("reinforce_plus_plus_baseline", GDPO),
    }
)
"""verl's advantage estimators whose baseline is the group's mean or the like."""

POLL_INTERVAL_S = 0.2
"""Seconds between two looks at what has been rolled out and scored. verl's own 2.0 s is not an option of its
configuration, and is a large part of a short step."""


class NothingToLearnError(RewardLoopError):
    """Every sample that an update was to learn from is without a score."""


class _RewardLoop:
    """What verl's trainer asks of its reward loop manager."""

    def __init__(self, workers: RewardWorkers, inside_rollout: bool) -> None:
        self.workers = workers
        self.reward_loop_worker_handles: list[RewardClient] | None = [workers.client] if inside_rollout else None


class _WithGroupSize:
    """A data loader whose rows know how many rollouts they will have, for managers that wait for all of them."""

    def __init__(self, loader: Any, n: int) -> None:
        self._loader = loader
        self._n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {**batch, "group_size": np.array(_group_sizes(batch, self._n), dtype=object)}

    def __len__(self) -> int:
        return len(self._loader)


def _group_sizes(batch: Any, n: int) -> list[int]:
    """How many rollouts each row of a batch will have: ``n``, or what verl's column ``__rollout_n__`` says."""
    sizes = batch.get("__rollout_n__", None)
    return [n] * len(batch["raw_prompt"]) if sizes is None else [int(size) for size in sizes]


class RewardLoopTrainer(PPOTrainer):
    """Overrides of verl's trainer. Mixed in before the class of a trainer mode by :func:`with_reward_loop`.

    Args:
        config: verl's whole configuration, settled.
        reward_router_address: how reward workers reach the router before the reward models.
        colocated: instead of it, the reward model on this trainer's GPUs.
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
        self._infos: dict[str, dict[str, Any]] = {}
        """``reward_extra_info`` of the step's trajectories that have their advantage."""
        config = without_reward(config)
        switch_estimator(config)
        super().__init__(config)
        self.replay_buffer.poll_interval = POLL_INTERVAL_S
        keep_groups_without_metric(self.replay_buffer)
        # verl replaces groups that failed, for ever if need be, and asks nobody whether they all will.
        Patience(self.replay_buffer, self._look_at_workers, *stall_timeout(self._full_config))

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(masking(worker.__ray_actor_class__))

    def _setup(self) -> None:
        if self._colocated is None:
            # First, so that they load while the policy does.
            self.reward_workers = RewardWorkers(self._full_config, self._reward_router_address)
        super()._setup()
        if self._colocated is not None:
            # The rollout sleeps now: the GPUs have the room that they will have for judging.
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

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        self._infos = {}
        with self._told_by_workers():
            return super().step(metrics, timing_raw)

    def _validate(self) -> dict[str, float]:
        with self._told_by_workers():
            return super()._validate()

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: dict[str, list], *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        return super()._val_metrics_update(
            data_sources, sample_uids, _numbers_only(reward_extra_infos_dict), *args, **kwargs
        )

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._ask_workers()

    def _look_at_workers(self) -> None:
        self.reward_workers.look_for_fatal_error()

    def _ask_workers(self) -> None:
        if self._full_config.trainer.v1.trainer_mode == "sync":
            self.reward_workers.raise_fatal_error()
        else:
            self.reward_workers.ask_for_fatal_error()  # samples of other prompts may be out

    @contextmanager
    def _told_by_workers(self) -> Iterator[None]:
        """Raises what the reward workers say must stop the run. verl turns the failure of every group into an error of
        its own that says nothing about the reward, and leaves out groups that failed."""
        try:
            yield
        except Exception as error:
            self._ask_workers()
            if isinstance(error, RayActorError):
                raise RewardLoopError(f"a process of the run died, and what it was at with it: {error}") from error
            raise
        self._ask_workers()

    def _compute_reward_colocate(self, batch: Any, metrics: dict | None = None) -> Any:
        """Scores the whole batch after the rollout: with ``use_reward_loop=False``, or by a model on these GPUs."""
        keys, rows = _session_rows(batch)
        if self._colocated is not None:
            with self._colocated.awake(metrics):
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
        if self._pending_rewards is not None:
            keys, pending = self._pending_rewards
            self._pending_rewards = None
            _write_rewards(batch, keys, self.reward_workers.finish_batch(pending))
        infos = _reward_infos(batch)
        changed = self._reject_parts(batch, infos)  # before the scores of a group are compared
        if self._post_processes:
            self._post_process(batch)
        if changed or self._post_processes:
            infos = _reward_infos(batch)
        _place_parts(batch, infos)
        self._infos.update(infos)
        metrics.update(_reward_metrics(infos))
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
        zero(
            [key for key in batch.keys if key not in learned],
            *(*self._advantage_fields(), *MASKS),
            partition_id=batch.partition_id,
        )
        return copy(batch)

    def _advantage_fields(self) -> list[str]:
        """What verl writes beside the masks when it computes the advantage. Rows without one need zeros there: verl
        reads the fields that all rows have."""
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

    def _reward_metrics(self) -> dict[str, float]:
        """The metrics of the step so far, for where the advantage is computed part by part."""
        return _reward_metrics(self._infos)

    def _reject_parts(self, batch: Any, infos: Mapping[str, dict[str, Any]]) -> bool:
        """Turns the rewards whose parts do not fit turns or tokens into those of failed samples, for all outputs of the
        session. Returns whether there were any."""
        keys = _keys_with_parts(infos)
        if not keys:
            return False
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        masks = data["response_mask"].unbind()
        problems = {key: misfit(mask, infos[key]) for key, mask in zip(keys, masks, strict=True)}
        rejected = {key: f"sample {key}: {problem}" for key, problem in problems.items() if problem is not None}
        rewards = [Reward(reward_score=0.0, reward_extra_info=infos[key]) for key in rejected]
        failed = self.reward_workers.reject(rewards, list(rejected.values()), len(keys) - len(rejected))
        if rejected:
            _write_rewards(batch, list(rejected), failed)
        return bool(rejected)

    def _post_process(self, batch: Any) -> None:
        """Hands the rewards of each group to the function's ``post_process_scores``, and takes what it returns."""
        keys, groups = _groups(batch)
        processed = self.reward_workers.post_process(groups, keys)
        _write_rewards(batch, [key for group in keys for key in group], [r for group in processed for r in group])


def with_reward_loop(trainer: type[PPOTrainer]) -> type[RewardLoopTrainer]:
    """The trainer of a mode, with rewards from the reward loop."""
    return type(f"RewardLoop{trainer.__name__}", (RewardLoopTrainer, trainer), {})


def _session_of(key: str) -> tuple[str, int]:
    """Splits verl's key ``{uid}_{session}_{index}`` into session and index."""
    session, index = key.rsplit("_", 1)
    return session, int(index)


def _session_rows(batch: Any) -> tuple[list[str], list[DataProto]]:
    """The rollouts of a batch as the agent loop hands them to a reward worker: one ``DataProto`` a session, a row an
    output. Returns the key of each session's last output beside it."""
    sessions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for position, key in enumerate(batch.keys):
        session, index = _session_of(key)
        sessions[session].append((index, position))
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tensors = {name: list(data[name].unbind()) for name in ("prompts", "responses", "input_ids", "position_ids")}
    others = {
        name: list(data[name])
        for name in data.keys()  # noqa: SIM118  iterating a TensorDict goes over its rows
        if not isinstance(data.get(name), torch.Tensor) and name not in ("rm_scores", "multi_modal_inputs")
    }
    keys, rows = [], []
    for outputs in sessions.values():
        positions = [position for _, position in sorted(outputs)]
        keys.append(batch.keys[positions[-1]])
        rows.append(_row(tensors, others, positions))
    return keys, rows


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


def _groups(batch: Any) -> tuple[list[list[str]], list[list[Reward]]]:
    """The rewards of a batch by group, members in order of their session, and the key of each one's last output."""
    last: dict[str, tuple[int, str]] = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        session, index = _session_of(key)
        if not tag.get("is_padding") and last.get(session, (-1, ""))[0] < index:
            last[session] = (index, key)
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for session, (_, key) in last.items():
        group, number = session.rsplit("_", 1)
        members[group].append((int(number), key))
    keys = [[key for _, key in sorted(group)] for group in members.values()]
    flat = [key for group in keys for key in group]
    data = tq.kv_batch_get(keys=flat, partition_id=batch.partition_id, select_fields=["rm_scores", "extra_fields"])
    rewards = {
        key: Reward(
            reward_score=float(scores.sum()),
            reward_extra_info=getattr(extra, "data", extra).get("reward_extra_info") or {},
        )
        for key, scores, extra in zip(flat, data["rm_scores"].unbind(), data["extra_fields"], strict=True)
    }
    return keys, [[rewards[key] for key in group] for group in keys]


def _write_rewards(batch: Any, keys: Sequence[str], rewards: Sequence[Reward]) -> None:
    """Puts the rewards of some sessions into TransferQueue: at the last token of all their outputs, as verl does.

    Args:
        batch: has all outputs of the sessions.
        keys: an output of each session.
        rewards: of each session.
    """
    by_session = {_session_of(key)[0]: reward for key, reward in zip(keys, rewards, strict=True)}
    # Padding rows were made from copies of others, and carry their fields.
    real = (key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding"))
    rows = [key for key in real if _session_of(key)[0] in by_session]
    data = tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=["responses", "extra_fields"])
    scores, extra_fields = [], []
    for key, response, extra in zip(rows, data["responses"].unbind(), list(data["extra_fields"]), strict=True):
        reward = by_session[_session_of(key)[0]]
        score = torch.zeros(len(response), dtype=torch.float32)
        score[-1:] = reward["reward_score"]
        scores.append(score)
        extra = getattr(extra, "data", extra)
        extra_fields.append({**extra, "reward_extra_info": reward["reward_extra_info"]})
    fields = TensorDict(
        {
            "rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged),
            "extra_fields": NonTensorStack(*extra_fields),
        },
        batch_size=len(rows),
    )
    tq.kv_batch_put(keys=rows, partition_id=batch.partition_id, fields=fields)


def _reward_infos(batch: Any) -> dict[str, dict[str, Any]]:
    """``reward_extra_info`` of each trajectory of a batch, without padding."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    extra_fields = [getattr(value, "data", value) for value in data["extra_fields"]]
    return {key: extra.get("reward_extra_info") or {} for key, extra in zip(keys, extra_fields, strict=True)}


def _place_parts(batch: Any, infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Spreads the rewards of trajectories whose function said so over turns and tokens."""
    keys = _keys_with_parts(infos)
    if not keys:
        return
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores", "response_mask"])
    rows = zip(keys, data["rm_scores"].unbind(), data["response_mask"].unbind(), strict=True)
    placed = [place(float(scores.sum()), mask, infos[key]) for key, scores, mask in rows]
    fields = TensorDict({"rm_scores": torch.nested.as_nested_tensor(placed, layout=torch.jagged)}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)


def _keys_with_parts(infos: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The last outputs of the sessions whose function said where parts of the reward go, masked ones left out."""
    last = {_session_of(key)[0]: key for key in sorted(infos, key=_session_of)}
    return [key for key in last.values() if has_parts(infos[key]) and not infos[key].get("reward_masked")]


_MEASURED = frozenset({"reward_seconds", "reward_wait_seconds", "reward_queue_seconds", "reward_attempts"})
"""What the reward loop itself measures of every sample."""


def _reward_metrics(infos: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Counts of outcomes, the mean of every number that the function returned, how long it took and waited, and how
    often it was called.

    Sessions count once. Keys may differ between samples: a mean is over those that have the key.
    """
    last: dict[str, tuple[int, dict[str, Any]]] = {}
    for key, info in infos.items():
        session, index = _session_of(key)
        if session not in last or last[session][0] < index:
            last[session] = (index, info)
    counts: dict[str, float] = {f"reward_loop/{outcome}": 0 for outcome in Outcome}
    measured: dict[str, list[float]] = defaultdict(list)
    components: dict[str, list[float]] = defaultdict(list)
    for _, info in last.values():
        outcome = info.get("reward_outcome")
        if outcome is not None:
            counts[f"reward_loop/{outcome}"] += 1
            for name in _MEASURED & info.keys():
                measured[name.removeprefix("reward_")].append(info[name])
        for name, value in info.items():
            if _is_number(value) and name not in RESERVED_KEYS:
                components[name].append(float(value))
    metrics = dict(counts)
    for name, values in measured.items():
        metrics[f"reward_loop/{name}/mean"] = float(np.mean(values))
        metrics[f"reward_loop/{name}/max"] = float(np.max(values))
    return metrics | {f"reward_loop/{name}/mean": float(np.mean(values)) for name, values in components.items()}


def _numbers_only(infos: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns of which a mean can be taken. verl takes that of whatever is no text: lists and dicts would end the run.
    By the texts of ``pred``, it counts votes."""
    return {
        name: [value if _is_number(value) or (name == "pred" and isinstance(value, str)) else None for value in values]
        for name, values in infos.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _without_baseline(keys: Collection[str], masked: set[str]) -> set[str]:
    """The trajectories that are the last of their group, all others being masked. verl takes 0 as the baseline of a
    group of one, so that the raw score would become the advantage."""
    members: dict[str, set[str]] = defaultdict(set)
    left: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        session, _ = _session_of(key)
        group = session.rsplit("_", 1)[0]
        members[group].add(session)
        if key not in masked:
            left[group].add(session)
    lone = {next(iter(sessions)) for group, sessions in left.items() if len(sessions) == 1 < len(members[group])}
    return {key for key in keys if _session_of(key)[0] in lone}
