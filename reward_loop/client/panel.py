"""Panels: the judgements of several judges, or several votes of one, combined to one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from statistics import fmean, multimode

from reward_loop._util.bounded_tasks import together
from reward_loop._util.transient import is_transient
from reward_loop.client.chat import Reply
from reward_loop.client.judge import Judgement
from reward_loop.errors import ConfigError, LimitError, ServerError


def mean(scores: Mapping[str, float]) -> float:
    """Return the mean of the scores."""
    return fmean(scores.values())


def majority(scores: Mapping[str, float]) -> float:
    """Return the most frequent score; of several that are equally frequent, the mean."""
    return fmean(multimode(scores.values()))


async def panel(
    asked: Mapping[str, Awaitable[Judgement]],
    *,
    quorum: int | None = None,
    combine: Callable[[Mapping[str, float]], float] = mean,
) -> Judgement:
    """Await the judgements of several judges on one response, all at the same time, and combine them.

        judgement = await panel({name: judge(address, answer=solution_str) for name, judge in judges.items()}, quorum=2)
        votes = await panel({f"vote_{i}": judge(address, answer=solution_str) for i in range(5)}, combine=majority)

    The votes of one judge differ only with a ``temperature`` above 0.

    Args:
        asked: the call of each judge, by a name for the logs.
        quorum: the smallest number of scores; by default more than half. A judge that fails, or gives no verdict, is
            missing.
        combine: returns the score of the response for the scores that there are, by name: `mean`, `majority`, or a
            function of your own.

    Returns:
        The judgement. Its components are the scores by name. Below the quorum without a failure, it is *unscored*.

    Raises:
        ServerError: there are failures, and too few scores for the quorum. It is transient, so that the function is
            called again, if the quorum can be reached then.
        ConfigError: the quorum is not from 1 to the number of judges, or ``combine`` is not a function. No judge is
            asked.
    """
    needed = len(asked) // 2 + 1 if quorum is None else quorum
    problem = None
    if not 1 <= needed <= len(asked):
        problem = f"quorum={needed}: it must be from 1 to the number of judges, {len(asked)}"
    elif not callable(combine):
        problem = f"combine={combine!r}: it must be a function, such as reward_loop.client.majority"
    if problem is not None:  # before the judges are asked, and paid for
        for one in asked.values():
            # Otherwise Python warns of a coroutine that was never awaited; a task of the caller would go on.
            one.close() if asyncio.iscoroutine(one) else asyncio.ensure_future(one).cancel()
        raise ConfigError(problem)
    results = dict(zip(asked, await together(map(_result, asked.values())), strict=True))
    failures = {name: result for name, result in results.items() if isinstance(result, Exception)}
    given = {name: result for name, result in results.items() if isinstance(result, Judgement)}
    scores = {name: judgement.score for name, judgement in given.items() if judgement.score is not None}
    missing = f"{len(scores)} of {len(asked)} judges gave a verdict, and the quorum is {needed}"
    if len(scores) < needed and failures:
        why = "; ".join(f"{name}: {error}" for name, error in failures.items())
        passing = [error for error in failures.values() if is_transient(error)]
        causes = passing if len(scores) + len(passing) >= needed else list(failures.values())
        # `is_transient` reads the group as the cause: it is transient if all of its parts are.
        raise ServerError(f"{missing}: {why}") from ExceptionGroup(missing, causes)
    reply = Reply("\n\n".join(f"[{name}]\n{judgement.reply.text}" for name, judgement in given.items()))
    prompt = next(iter(given.values())).prompt
    verdicts = {name: judgement.verdict for name, judgement in given.items()}
    if len(scores) < needed:
        return Judgement(None, verdicts, prompt, reply, missing, scores)
    return Judgement(combine(scores), verdicts, prompt, reply, components=scores)


async def _result(asked: Awaitable[Judgement]) -> Judgement | Exception:
    try:
        return await asked
    except (ServerError, LimitError) as error:  # others, such as a missing API key, are mistakes and end the panel
        return error
