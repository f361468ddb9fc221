"""verifiers: a reward for its tasks, plugged in by the configuration.

    --env.taskset.task.rewards.reward_loop.fn reward_loop.adapters.verifiers:reward

Nothing of verifiers is imported: its tasks and traces are used by their fields.
"""

from __future__ import annotations

from typing import Any

from reward_loop.adapters.process_agent import process_agent
from reward_loop.errors import ConfigError, ScoringError
from reward_loop.types import RewardSample, returned_numbers

__all__ = ["reward"]

_LACKS = frozenset({"response_ids", "is_truncated", "global_steps", "training_progress", "validate"})


async def reward(task: Any, trace: Any) -> float:
    """Return the reward of a trace; its components become metrics of the trace.

    The response is the last reply, the ground truth the field ``answer`` of the task (the option ``ground_truth``
    names another), and ``extra_info`` contains all fields of the task. The options are in the file in
    ``REWARD_LOOP_CONFIG``.

    Args:
        task: the task's data, a ``verifiers.v1.TaskData``.
        trace: the ``verifiers.v1.Trace`` to score.

    Raises:
        ScoringError: the trace has no score (masked). verifiers stores the error in the trace, and excludes the trace.
        ConfigError: an option is invalid, or the manager compares several samples.
        RewardLoopError: an error that must stop the run, such as too many failures; verifiers stores it in the trace.
    """
    agent = await process_agent(lacks=_LACKS)
    if agent.needs_group:
        raise ConfigError(
            f"the manager {agent.config.manager!r}, or post_process_scores, compares the samples of a group, but "
            "verifiers scores each trace alone: use a manager that scores single samples"
        )
    sample = RewardSample(
        trace.last_reply,
        **agent.parts(task.model_dump(), "answer"),
        uid=trace.id,
        response_length=trace.num_output_tokens,
        prompt=task.prompt,
        validate=None,
    )
    [result] = await agent.score([sample])
    trace.record_metrics(returned_numbers(result.extra_info))
    if result.reward is None:
        raise ScoringError(result.error or f"sample {trace.id}: {result.reason or 'it is masked'}")
    return result.reward
