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
from tensordict import NonTensorStack, TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto

from reward_loop.managers.base import VALIDATE
from reward_loop.types import Reward
from reward_loop.verl.token_rewards import has_parts, place
from reward_loop.verl.tq_batches import extra_fields_of
from reward_loop.verl.trajectory_keys import final_outputs, session_of

__all__ = [
    "keys_with_parts",
    "place_parts",
    "read_groups",
    "read_reward_infos",
    "read_sessions",
    "write_rewards",
]

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


def _unpadded(batch: Any) -> list[str]:
    """Returns the keys of a batch without its padding rows, which are copies of other rows."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]


def read_groups(batch: Any) -> tuple[list[list[str]], list[list[Reward]]]:
    """Returns the groups of a batch that have not been post-processed.

    Returns:
        For each group, the keys of its sessions' last outputs, and their rewards, both in the order of the sessions.
    """
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for key in final_outputs(_unpadded(batch)):
        group, number = session_of(key)[0].rsplit("_", 1)
        members[group].append((int(number), key))
    keys = [[key for _, key in sorted(group)] for group in members.values()]
    flat = [key for group in keys for key in group]
    if not flat:
        return [], []
    data = tq.kv_batch_get(keys=flat, partition_id=batch.partition_id, select_fields=["rm_scores", "extra_fields"])
    rewards = {
        key: Reward(reward_score=float(scores.sum()), reward_extra_info=extra.get("reward_extra_info") or {})
        for key, scores, extra in zip(flat, data["rm_scores"].unbind(), extra_fields_of(data), strict=True)
        if RAW_SCORE not in extra
    }
    keys = [group for group in keys if all(key in rewards for key in group)]
    return keys, [[rewards[key] for key in group] for group in keys]


def write_rewards(
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
    rows = [key for key in _unpadded(batch) if session_of(key)[0] in by_session]
    data = tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=["responses", "extra_fields"])
    scores, extra_fields = [], []
    for key, response, extra in zip(rows, data["responses"].unbind(), extra_fields_of(data), strict=True):
        reward = by_session[session_of(key)[0]]
        score = torch.zeros(len(response), dtype=torch.float32)
        score[-1:] = reward["reward_score"]
        scores.append(score)
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


def read_reward_infos(batch: Any) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Returns ``reward_extra_info``, and the score before ``post_process_scores``, by key of the trajectory.

    Padding rows are left out.
    """
    keys = _unpadded(batch)
    if not keys:
        return {}, {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields", "rm_scores"])
    extra_fields = extra_fields_of(data)
    infos = {key: extra.get("reward_extra_info") or {} for key, extra in zip(keys, extra_fields, strict=True)}
    raw_scores = {
        key: extra.get(RAW_SCORE, float(scores.sum()))
        for key, extra, scores in zip(keys, extra_fields, data["rm_scores"].unbind(), strict=True)
    }
    return infos, raw_scores


def place_parts(batch: Any, infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Distributes rewards over turns and tokens where the function returned scores for them."""
    keys = keys_with_parts(infos)
    if not keys:
        return
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores", "response_mask"])
    rows = zip(keys, data["rm_scores"].unbind(), data["response_mask"].unbind(), strict=True)
    placed = [place(float(scores.sum()), mask, infos[key]) for key, scores, mask in rows]
    fields = TensorDict({"rm_scores": torch.nested.as_nested_tensor(placed, layout=torch.jagged)}, batch_size=len(keys))
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)


def keys_with_parts(infos: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the last outputs of unmasked sessions with ``turn_level_scores`` or ``token_level_scores``."""
    last = {session_of(key)[0]: key for key in sorted(infos, key=session_of)}
    return [key for key in last.values() if has_parts(infos[key]) and not infos[key].get("reward_masked")]
