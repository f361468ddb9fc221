"""ms-swift: the reward ``reward_loop`` for GRPO and its relatives.

Write a plug-in of two lines, and start ``swift rlhf --external_plugins plugin.py --reward_funcs reward_loop``:

    from reward_loop.adapters.swift import register
    register()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop.adapters.process_agent import ProcessAgent, Source, process_agent
from reward_loop.errors import ConfigError
from reward_loop.managers.base import progress_of
from reward_loop.types import RewardSample

__all__ = ["register", "score_completions"]

_LACKS = frozenset({"is_truncated", "validate"})

_INTERNAL = {"messages", "prompt_id", "request_id", "response_token_ids", "rollout_infos", "trainer_state"}
"""Columns that ms-swift adds to those of the data set; functions do not receive them."""


def register(name: str = "reward_loop", config: Source = None) -> None:
    """Add a reward to ``swift.rewards.orms``, by whose name ``--reward_funcs`` selects it.

    Args:
        name: the name of the reward.
        config: the options, or the path of their file; by default the file in ``REWARD_LOOP_CONFIG``.
    """
    from swift.rewards import AsyncORM, orms

    class RewardLoop(AsyncORM):
        """Scores the completions of a batch at the same time."""

        async def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
            return await score_completions(completions, columns, config, self.args)

    orms[name] = RewardLoop


async def score_completions(
    completions: Sequence[Any], columns: Mapping[str, Any], config: Source = None, args: Any = None
) -> list[float | None]:
    """Return the score of each completion, ``None`` for one without a score (masked).

    Args:
        completions: the completions of a batch.
        columns: lists of the same length: the columns of the data set, and those of ms-swift. The ground truth is the
            column ``solution``, unless the option ``ground_truth`` names another.
        config: see `register`.
        args: the arguments of ms-swift, with ``num_generations``.

    Raises:
        ConfigError: an option is invalid, the function requires a column that the data set does not have, or the
            manager compares the completions of a prompt, and not all of them are in this batch.
        RewardLoopError: an error that must stop the run, such as too many failures.
    """
    agent = await process_agent(config, lacks=_LACKS)
    lists = {name: column for name, column in columns.items() if _is_column(column, len(completions))}
    state = columns.get("trainer_state")
    # ms-swift counts the steps that have ended, as TRL does; this reward is for the next one.
    step = None if state is None else state.global_step + 1
    progress = progress_of(step, getattr(state, "max_steps", None))
    samples = [
        _to_sample(agent, completion, {name: column[i] for name, column in lists.items()}, step, progress)
        for i, completion in enumerate(completions)
    ]
    # The agent needs the members of a group as neighbours, in whatever order ms-swift passes them.
    order, groups = list(range(len(samples))), None
    if agent.needs_group:
        order, groups = _grouped(agent.config.manager, lists.get("prompt_id"), args)
    results = await agent.score([samples[i] for i in order], groups)
    scores: list[float | None] = [None] * len(samples)
    for i, result in zip(order, results, strict=True):
        scores[i] = result.reward
    return scores


def _is_column(value: Any, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == length


def _to_sample(
    agent: ProcessAgent, completion: Any, row: Mapping[str, Any], step: int | None, progress: float | None
) -> RewardSample:
    """Return the sample of a completion, with its values of all columns."""
    tokens = row.get("response_token_ids") or []  # of the response, or a list for each turn of the policy
    ids = [token for part in tokens for token in (part if isinstance(part, list) else [part])]
    return RewardSample(
        str(completion),
        **agent.parts({name: value for name, value in row.items() if name not in _INTERNAL}, "solution"),
        uid=str(row["request_id"]) if "request_id" in row else None,
        response_length=len(ids) or None,
        response_ids=ids or None,
        training_progress=progress,
        validate=None,
        prompt=row["messages"][:-1] if "messages" in row else None,
        step=step,
    )


def _grouped(manager: str, prompts: Sequence[Any] | None, args: Any) -> tuple[list[int], list[int]]:
    """Return the order in which the completions of a prompt are neighbours, and the size of each group."""
    if prompts is None:
        raise ConfigError(
            f"the manager {manager!r}, or post_process_scores of the function, compares the completions of a "
            "prompt, and ms-swift passed no prompt_id"
        )
    members: dict[Any, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(i)
    sizes = [len(group) for group in members.values()]
    whole, in_evaluation = getattr(args, "num_generations", None), getattr(args, "num_generations_eval", None)
    parts = [size for size in sizes if whole and size % whole]
    # ms-swift does not pass whether this is an evaluation: in one, every group has exactly this size.
    if parts and any(size != in_evaluation for size in sizes):
        raise ConfigError(
            f"the manager {manager!r}, or post_process_scores, compares the completions of a prompt, but this "
            f"process has {parts[0]} of {whole}: make the batch size of a process a multiple of num_generations (in an "
            "evaluation, of num_generations_eval)"
        )
    return [i for group in members.values() for i in group], sizes
