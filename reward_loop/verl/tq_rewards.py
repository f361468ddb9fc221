"""Reads rewards from TransferQueue, and writes them to it.

Keys of rows are ``{uid}_{session}_{index}``: a prompt, one of its rollouts (a session), and an output of that rollout.
Rows that verl adds as padding are copies of other rows, and never get a reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto

from reward_loop.managers.base import VALIDATE
from reward_loop.types import Reward
from reward_loop.verl.reward_metrics import TrajectoryReward
from reward_loop.verl.tq_batches import field_names, read_rows, unpadded, write_rows
from reward_loop.verl.trajectory_keys import session_of

__all__ = ["read_rewards", "read_sessions", "write_rewards"]

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


def read_sessions(batch: Any) -> tuple[list[str], list[DataProto]]:
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
    if batch.partition_id == "val":
        others[VALIDATE] = [True] * len(batch.keys)
    keys, rows = [], []
    for outputs in sessions.values():
        positions = [position for _, position in sorted(outputs)]
        keys.append(batch.keys[positions[-1]])
        rows.append(_row(tensors, others, positions))
    return keys, rows


def _reward_columns(batch: Any) -> list[str]:
    """Returns the columns that a reward worker receives: those of the data set, and `AGENT_OUTPUT`."""
    names = field_names(batch.keys[0], batch.tags[0], batch.partition_id)
    return [name for name in names if name in AGENT_OUTPUT or name not in NOT_FOR_REWARDS]


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


def read_rewards(batch: Any) -> dict[str, TrajectoryReward]:
    """Returns the rewards of a batch by key of the trajectory, without padding rows."""
    keys = unpadded(batch)
    rewards = {}
    for key, (extra, scores) in zip(
        keys, read_rows(keys, batch.partition_id, "extra_fields", "rm_scores"), strict=True
    ):
        reward = float(scores.sum())
        rewards[key] = TrajectoryReward(
            info=extra.get("reward_extra_info") or {},
            reward=reward,
            raw_score=extra.get(RAW_SCORE, reward),
            post_processed=RAW_SCORE in extra,
            tokens=len(scores),
        )
    return rewards


def write_rewards(
    batch: Any, keys: Sequence[str], rewards: Sequence[Reward], raw_scores: Mapping[str, float] | None = None
) -> None:
    """Writes the rewards of some sessions to TransferQueue: at the last token of all their outputs, as verl does.

    Args:
        batch: a batch with all outputs of the sessions; rows of other sessions stay as they are.
        keys: the key of one output of each session, in the order of ``rewards``.
        rewards: the reward of each session.
        raw_scores: the scores before ``post_process_scores``, by key, if the rewards are its results.
    """
    by_session = {session_of(key)[0]: reward for key, reward in zip(keys, rewards, strict=True)}
    raw = {session_of(key)[0]: {RAW_SCORE: score} for key, score in (raw_scores or {}).items()}
    rows = [key for key in unpadded(batch) if session_of(key)[0] in by_session]
    scores, extra_fields = [], []
    for key, (response, extra) in zip(
        rows, read_rows(rows, batch.partition_id, "responses", "extra_fields"), strict=True
    ):
        session = session_of(key)[0]
        score = torch.zeros(len(response), dtype=torch.float32)
        score[-1:] = by_session[session]["reward_score"]
        scores.append(score)
        info = by_session[session]["reward_extra_info"]
        extra_fields.append({**extra, **raw.get(session, {}), "reward_extra_info": info})
    write_rows(rows, batch.partition_id, rm_scores=scores, extra_fields=extra_fields)
