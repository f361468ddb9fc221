"""verifiers: a reward for its tasks, plugged in by the configuration.

    --env.taskset.task.rewards.reward_loop.fn reward_loop.adapters.verifiers:reward

Nothing of verifiers is imported: its tasks and traces are used by their fields.
"""

from __future__ import annotations

from typing import Any

from reward_loop.adapters.process_agent import info_of, missing_field, process_agent
from reward_loop.errors import ConfigError, ScoringError
from reward_loop.types import RewardSample, returned_numbers

__all__ = ["reward"]


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
    agent = await process_agent()
    if agent.needs_group:
        raise ConfigError(
            f"the manager {agent.config.manager!r}, or post_process_scores, compares the samples of a group, but "
            "verifiers scores each trace alone: use a manager that scores single samples"
        )
    data = task.model_dump()
    field = agent.config.ground_truth or "answer"
    if field not in data and "ground_truth" in agent.requires:
        raise missing_field(agent, field, sorted(data))
    sample = RewardSample(
        trace.last_reply,
        data_source=str(data.get(agent.config.data_source) or ""),
        ground_truth=data.get(field),
        extra_info=data,
        uid=trace.id,
        response_length=trace.num_output_tokens,
        prompt=task.prompt,
    )
    [found] = await agent.score([sample])
    info = info_of(found)
    trace.record_metrics(returned_numbers(info))
    if info["reward_masked"]:
        # The error of a failure names the sample already.
        raise ScoringError(info["reward_error"] or f"sample {trace.id}: the function gave no score")
    return found["reward_score"]
