"""The rows of a batch in TransferQueue: select, read, write and clear them, their rewards and their tags.

Only this module calls TransferQueue.

Keys of rows are ``{uid}_{session}_{index}``: a prompt, one of its rollouts (a session), and an output of that rollout.
Rows that verl adds as padding never get a reward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict, is_non_tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta as KVBatchMeta  # also for the other modules of this package
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto

from reward_loop.types import Reward, RewardResult
from reward_loop.verl.samples import FAILURE, JUDGING_TIMES, TURNS, VALIDATE, final_outputs, session_of, uid_of

MASKS = ("response_mask", "loss_mask")
"""The fields that mark which tokens of a response are trained on."""


def copy(batch: KVBatchMeta) -> KVBatchMeta:
    """Return a copy of the batch metadata.

    verl changes the ``extra_info`` of its argument, and caches field names that only some rows have.
    """
    return select(batch, range(len(batch.keys)))


def select(batch: KVBatchMeta, positions: Sequence[int]) -> KVBatchMeta:
    """Return the rows at these positions of a batch, in this order."""
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[i] for i in positions],
        tags=[batch.tags[i] for i in positions],
        extra_info=dict(batch.extra_info or {}),
    )


def spread_learners(is_learner: Sequence[bool], ranks: int, size: int) -> list[int]:
    """Return an order of the rows of an update, with equally many learners in each mini-batch, give or take one.

    Rows that are not needed to fill mini-batches are left out: an optimizer moves the weights also for a mini-batch
    without a learner.

    Args:
        is_learner: for each row, whether it is trained on. The others are padding.
        ranks: the number of data-parallel ranks. Each trains on an equal part of the rows, in order.
        size: the number of rows of a mini-batch, over all ranks.
    """
    learners = [row for row, learns in enumerate(is_learner) if learns]
    padding = iter([row for row, learns in enumerate(is_learner) if not learns])
    mini_batches = math.ceil(len(learners) / size)
    own = len(is_learner) // ranks
    if mini_batches * size == len(is_learner):  # keep the ranks, which verl has balanced by tokens
        of_rank = [[row for row in learners if row // own == rank] for rank in range(ranks)]
    else:
        of_rank = [learners[rank::ranks] for rank in range(ranks)]
    order: list[int] = []
    turn = 0
    for rows in of_rank:
        for number in range(mini_batches):
            part = rows[(number - turn) % mini_batches :: mini_batches]
            order += [*part, *islice(padding, size // ranks - len(part))]
        turn += len(rows)
    return order


def unpadded(batch: KVBatchMeta) -> list[str]:
    """Return the keys of a batch without its padding rows, which are copies of other rows."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]


def read_rows(keys: Sequence[str], partition_id: str, *fields: str) -> list[tuple[Any, ...]]:
    """Return the values of these fields, as a tuple for each key."""
    if not keys:
        return []
    columns = read_columns(keys, partition_id, fields)
    return list(zip(*(columns[field] for field in fields), strict=True))


def read_columns(keys: Sequence[str], partition_id: str, fields: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values of those of the fields that all rows have."""
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=list(fields))
    return {field: _values(data[field]) for field in fields if field in data.keys()}  # noqa: SIM118  not the rows


def _values(column: Any) -> Sequence[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind()
    return [value.data if is_non_tensor(value) else value for value in column]


def field_names(key: str, tag: dict, partition_id: str) -> list[str]:
    """Return the names of the fields that a row has."""
    # TransferQueue returns them after a write. This write changes nothing.
    return tq.kv_batch_put(keys=[key], partition_id=partition_id, tags=[tag]).fields


def write_tags(keys: Sequence[str], partition_id: str, tags: list[dict[str, Any]]) -> None:
    """Write tags of some rows, beside those that they have."""
    tq.kv_batch_put(keys=list(keys), partition_id=partition_id, tags=tags)


async def add_tag(key: str, partition_id: str, tag: dict[str, Any]) -> None:
    """Write a tag of one row, on the event loop."""
    await tq.async_kv_put(key=key, partition_id=partition_id, tag=tag)


async def add_rows(keys: list[str], partition_id: str, fields: Any, tags: list[dict[str, Any]]) -> None:
    """Write fields and tags of some rows, on the event loop."""
    await tq.async_kv_batch_put(keys=keys, fields=fields, tags=tags, partition_id=partition_id)


def clear(keys: Sequence[str], partition_id: str) -> None:
    """Remove some rows."""
    tq.kv_clear(keys=list(keys), partition_id=partition_id)


def write_rows(keys: Sequence[str], partition_id: str, **columns: Sequence[Any]) -> None:
    """Write fields of some rows. Each column has a value for each key: a tensor, or any other object."""
    if not keys:
        return
    fields = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        if isinstance(values[0], torch.Tensor)
        else NonTensorStack(*values)
        for name, values in columns.items()
    }
    tq.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=TensorDict(fields, batch_size=len(keys)))


def zero(keys: Sequence[str], *fields: str) -> None:
    """Write zeros to fields of some training rows, one for each token of the response."""
    masks = [mask for (mask,) in read_rows(keys, "train", "response_mask")]
    zeros = {
        field: [torch.zeros_like(mask, dtype=None if field in MASKS else torch.float32) for mask in masks]
        for field in fields
    }
    write_rows(keys, "train", **zeros)


def read_tags() -> tuple[dict[str, dict], dict[str, dict]]:
    """Return the tags of the training prompts, and the tags of their trajectories, that are in TransferQueue."""
    items = (tq.kv_list("train") or {}).get("train", {})
    prompts = {key: tag for key, tag in items.items() if tag.get("is_prompt")}
    return prompts, {key: tag for key, tag in items.items() if key not in prompts}


def last_failure() -> str:
    """Return a sentence about the latest rollout of the training prompts that failed without a trajectory."""
    prompts, _ = read_tags()
    failure = next((tag[FAILURE] for tag in reversed(prompts.values()) if tag.get(FAILURE)), None)
    return f"The last rollout that failed is {failure}" if failure else "See the log of the agent loop workers"


def read_trajectories(uids: Collection[str]) -> KVBatchMeta:
    """Return the trajectories of these training prompts that are in TransferQueue."""
    _, trajectories = read_tags()
    rows = {key: tag for key, tag in trajectories.items() if uid_of(key) in uids}
    return KVBatchMeta(partition_id="train", keys=list(rows), tags=list(rows.values()))


INFO = "reward_extra_info"
"""Key of a trajectory's ``extra_fields``: the extra info of its reward."""

TENSORS = ("prompts", "responses", "input_ids", "position_ids")

AGENT_OUTPUT = frozenset({*TENSORS, "response_mask", "num_turns", "extra_fields"})
"""Columns of an agent loop's output of which a reward worker receives something."""

NOT_FOR_REWARDS = frozenset(AgentLoopOutput.model_fields).union(
    ("loss_mask", "rollout_log_probs", "rm_scores", "multi_modal_inputs", "teacher_ids", "teacher_logprobs")
)
"""Columns that an agent loop writes; all other columns come from the data set."""


def read_sessions(batch: Any) -> tuple[list[str], list[DataProto]]:
    """Return the rollouts of a batch in the form in which the agent loop sends them to a reward worker.

    Returns:
        The key of each session's last output; and for each session, a ``DataProto`` with one row per output.
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
    for keys in sessions.values():
        keys.sort(key=session_of)
    samples = [
        # Workers tell the members of a group apart by it, and an agent loop manager of the user may not write it.
        _as_data_proto([{"session_id": name.rsplit("_", 1)[1], **outputs[key]} for key in keys], batch.partition_id)
        for name, keys in sessions.items()
    ]
    return [keys[-1] for keys in sessions.values()], samples


def _as_data_proto(outputs: Sequence[Mapping[str, Any]], partition_id: str) -> DataProto:
    tensors = {name: [output[name] for output in outputs] for name in TENSORS}
    tensors["attention_mask"] = [torch.ones_like(ids) for ids in tensors["input_ids"]]
    columns = {
        name: [output[name] for output in outputs]
        for name, value in outputs[0].items()
        if not isinstance(value, torch.Tensor)
    }
    columns["__num_turns__"] = columns.pop("num_turns", [None for _ in outputs])
    columns["tool_extra_fields"] = [
        {name: value for name, value in extra.items() if name != INFO}
        for extra in columns.pop("extra_fields", [{} for _ in outputs])
    ]
    columns[TURNS] = [turns_of(output["response_mask"].tolist()) for output in outputs]
    columns["response_len"] = [len(response) for response in tensors["responses"]]
    columns[VALIDATE] = [partition_id == "val" for _ in outputs]
    padded = {name: pad_sequence(values, batch_first=True) for name, values in tensors.items()}
    return DataProto(
        batch=TensorDict(padded, batch_size=len(outputs)),
        non_tensor_batch={name: _objects(values) for name, values in columns.items()},
    )


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    # Not `np.array(values)`, which makes lists of equal length a two-dimensional array.
    column[:] = values
    return column


@dataclass(slots=True)
class TrajectoryReward:
    """The reward of a trajectory, of one output of a session, as TransferQueue has it."""

    info: Mapping[str, Any]
    """Its ``reward_extra_info``."""
    reward: float
    """The sum of the rewards of its tokens. An agent loop may have set a number that is not finite: it is masked."""
    tokens: int = 0
    """The number of tokens of the response."""
    session: str | None = None
    """The session, for messages."""
    judging: tuple[float, float] | None = None
    """When judging began, and when the reward had arrived; ``None`` if the agent loop worker did not request it."""
    result: RewardResult = field(init=False)
    """The result of scoring. A sample without an outcome got its score from the agent loop."""

    def __post_init__(self) -> None:
        self.result = RewardResult.of(Reward(reward_score=self.reward, reward_extra_info={**self.info}), self.session)


def read_rewards(batch: Any) -> dict[str, TrajectoryReward]:
    """Return the rewards of a batch by key of the trajectory, without padding rows."""
    keys = unpadded(batch)
    if not keys:
        return {}
    columns = read_columns(keys, batch.partition_id, ("extra_fields", "rm_scores"))
    if "extra_fields" not in columns:
        _complete(batch)
        columns = read_columns(keys, batch.partition_id, ("extra_fields", "rm_scores"))
    rewards = {}
    for key, extra, scores in zip(keys, columns["extra_fields"], columns["rm_scores"], strict=True):
        # One score for each token of the response.
        info, tokens = extra.get(INFO) or {}, len(scores)
        session = session_of(key)[0]
        rewards[key] = TrajectoryReward(info, float(scores.sum()), tokens, session, extra.get(JUDGING_TIMES))
    return rewards


def _complete(batch: Any) -> None:
    """Write ``extra_fields`` to the rows that have none.

    An agent loop manager that writes its rows itself, such as that of verl's uni-agent, writes the extra info of the
    reward as a field of its own.
    """
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        names = field_names(key, tag, batch.partition_id)
        if "extra_fields" not in names:
            info = read_rows([key], batch.partition_id, INFO)[0][0] if INFO in names else {}
            write_rows([key], batch.partition_id, extra_fields=[{INFO: info}])


def write_rewards(batch: Any, keys: Sequence[str], rewards: Sequence[Reward]) -> None:
    """Write the rewards of some sessions to TransferQueue, to all their outputs, see `token_rewards`.

    Args:
        batch: a batch with all outputs of the sessions; rows of other sessions stay as they are.
        keys: the key of one output of each session, in the order of ``rewards``.
        rewards: the reward of each session.
    """
    by_session = {session_of(key)[0]: reward for key, reward in zip(keys, rewards, strict=True)}
    rows = [key for key in unpadded(batch) if session_of(key)[0] in by_session]
    last = set(final_outputs(rows))  # the parts of a reward are those of the last output
    scores, extra_fields = [], []
    read = read_rows(rows, batch.partition_id, "response_mask", "extra_fields")
    for key, (mask, extra) in zip(rows, read, strict=True):
        reward = by_session[session_of(key)[0]]
        info = reward["reward_extra_info"]
        scores.append(token_rewards(reward["reward_score"], mask, info if key in last else {}))
        extra_fields.append({**extra, INFO: info})
    write_rows(rows, batch.partition_id, rm_scores=scores, extra_fields=extra_fields)


def turns_of(response_mask: Sequence[int]) -> list[int]:
    """Return the number of tokens of each part by the policy (1 in the mask) and by the environment (0) in turn.

    Begins with the policy, whose first part may be empty.
    """
    parts = [(bool(written), len(list(part))) for written, part in groupby(response_mask)]
    lengths = [length for _, length in parts]
    return [0, *lengths] if parts and not parts[0][0] else lengths


def token_rewards(reward: float, response_mask: Sequence[int], info: Mapping[str, Any]) -> torch.Tensor:
    """Return the reward of each token of a response.

    Args:
        reward: the sum of the rewards of all tokens. The difference to the sum of the parts goes to the last token that
            the policy wrote: tokens of a tool or the user, which may stand behind it, are not trained on.
        response_mask: 1 for tokens of the policy, 0 for tokens of a tool or the user.
        info: what the function returned; see `PART_KEYS`. It has one score for each token or turn. A turn's score goes
            to its last token.

    Returns:
        A float32 tensor of shape (tokens,).
    """
    mask = torch.as_tensor(response_mask)
    placed = torch.zeros(len(mask), dtype=torch.float32)
    ends = ((mask > 0) & (torch.cat([mask[1:], mask.new_zeros(1)]) == 0)).nonzero().flatten()
    for name, tokens in (("token_level_scores", slice(None)), ("turn_level_scores", ends)):
        if (parts := info.get(name)) is not None:
            placed[tokens] += torch.as_tensor(parts, dtype=torch.float32)
    # A response may have no token, or none of the policy.
    last = ends[-1:] if len(ends) else slice(-1, None)
    placed[last] += reward - placed.sum()
    return placed
