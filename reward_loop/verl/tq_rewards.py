"""Reads rewards from TransferQueue, and writes them to it.

Keys of rows are ``{uid}_{session}_{index}``: a prompt, one of its rollouts (a session), and an output of that rollout.
Rows that verl adds as padding are copies of other rows, and never get a reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto

from reward_loop.managers.base import VALIDATE
from reward_loop.types import Reward
from reward_loop.verl.compat import uses
from reward_loop.verl.reward_metrics import TrajectoryReward
from reward_loop.verl.tq_batches import field_names, read_columns, read_rows, unpadded, write_rows
from reward_loop.verl.trajectory_keys import session_of

__all__ = ["read_rewards", "read_sessions", "write_rewards"]

uses(__name__, "verl.protocol:DataProto", "batch", "non_tensor_batch")

RAW_SCORE = "raw_score"
"""Key of a trajectory's ``extra_fields``: its score before ``post_process_scores``. Only groups that have been
post-processed have it."""

TENSORS = ("prompts", "responses", "input_ids", "position_ids")

AGENT_OUTPUT = frozenset({*TENSORS, "num_turns", "extra_fields"})
"""Columns of an agent loop's output that a reward worker receives."""

NOT_FOR_REWARDS = frozenset(AgentLoopOutput.model_fields).union(
    ("loss_mask", "rollout_log_probs", "rm_scores", "multi_modal_inputs", "teacher_ids", "teacher_logprobs")
)
"""Columns that an agent loop writes; all other columns come from the data set."""


def read_sessions(batch: Any) -> tuple[list[str], list[DataProto]]:
    """Returns the rollouts of a batch in the form in which the agent loop sends them to a reward worker.

    Returns:
        The key of each session's last output; and a ``DataProto`` for each session, with one row per output.
    """
    # Only these: images and routed experts are large.
    names = [
        name
        for name in field_names(batch.keys[0], batch.tags[0], batch.partition_id)
        if name in AGENT_OUTPUT or name not in NOT_FOR_REWARDS
    ]
    # The first row may have fields that others lack, such as log-probabilities that the trainer has computed.
    columns = read_columns(batch.keys, batch.partition_id, names)
    values = zip(*columns.values(), strict=True)
    outputs = {key: dict(zip(columns, row, strict=True)) for key, row in zip(batch.keys, values, strict=True)}
    sessions: dict[str, list[str]] = defaultdict(list)
    for key in batch.keys:
        sessions[session_of(key)[0]].append(key)
    rows = []
    for keys in sessions.values():
        keys.sort(key=session_of)
        rows.append(_as_data_proto([outputs[key] for key in keys]))
        if batch.partition_id == "val":
            rows[-1].non_tensor_batch[VALIDATE] = np.array([True] * len(keys))
    return [keys[-1] for keys in sessions.values()], rows


def _as_data_proto(outputs: Sequence[Mapping[str, Any]]) -> DataProto:
    tensors = {name: [output[name] for output in outputs] for name in TENSORS}
    tensors["attention_mask"] = [torch.ones_like(ids) for ids in tensors["input_ids"]]
    columns = {
        name: [output[name] for output in outputs]
        for name, value in outputs[0].items()
        if not isinstance(value, torch.Tensor)
    }
    columns["__num_turns__"] = columns.pop("num_turns", [None for _ in outputs])
    columns["tool_extra_fields"] = columns.pop("extra_fields", [{} for _ in outputs])
    columns["response_len"] = [len(response) for response in tensors["responses"]]
    padded = {name: pad_sequence(values, batch_first=True) for name, values in tensors.items()}
    return DataProto(
        batch=TensorDict(padded, batch_size=len(outputs)),
        non_tensor_batch={name: _objects(values) for name, values in columns.items()},
    )


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
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
