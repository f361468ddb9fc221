"""Several judges on one response: panels, whose judgements are combined, and spot checks of a cheap judge.

Invariants of spot checks, without which the mean reward differs from the mean of the strong judge's scores, and a
policy gains by deceiving the cheap one:

- The choice depends on nothing that a judge said. It is the same when the function is called again after a failure.
- A chosen answer gets a reward only with the strong judge's verdict. The cheap score never stands in for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from statistics import fmean, multimode
from typing import Any

from reward_loop._util.bounded_tasks import together
from reward_loop._util.transient import is_transient
from reward_loop.client.chat import Reply
from reward_loop.client.judge import Judgement
from reward_loop.errors import ConfigError, LimitError, ServerError
from reward_loop.records import ActiveBatch, current

Judged = Judgement | Mapping[str, Any] | float
"""What a judge returns: a `Judgement`, a number, or a mapping with ``score``, as a reward function returns it."""


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
        ConfigError: the quorum is not from 1 to the number of judges. No judge is asked.
    """
    needed = len(asked) // 2 + 1 if quorum is None else quorum
    if not 1 <= needed <= len(asked):  # before the judges are asked, and paid for
        for one in asked.values():
            # Otherwise Python warns of a coroutine that was never awaited; a task of the caller would go on.
            one.close() if asyncio.iscoroutine(one) else asyncio.ensure_future(one).cancel()
        raise ConfigError(f"quorum={needed}: it must be from 1 to the number of judges, {len(asked)}")
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


async def spot_check(
    cheap: Judged | Awaitable[Judged],
    strong: Awaitable[Judged] | Callable[[], Awaitable[Judged]],
    share: float = 0.2,
    *,
    seed: int = 0,
    uid: str | None = None,
) -> Judgement:
    """Score a response by a cheap judge, and check a random share of the responses by a strong one, without bias.

        asked = {"question": extra_info["question"], "answer": solution_str}
        judgement = await spot_check(cheap(router, **asked), strong(**asked), share=0.2)
        return judgement.reward()

    The score is ``cheap + (strong - cheap) / share`` for the share that is checked, and ``cheap`` for all others. For
    every policy, its mean is that of the strong judge's scores. With scores from 0 to 1 and a share of 0.2, it is from
    -4 to 5: do not clip it. docs/judges.md has measurements and the theory.

    A sample is checked if the first 8 bytes of the SHA-256 digest of ``SEED\\nUID\\nSTEP``, as a big-endian fraction,
    are below the share. UID is that of the sample, and STEP its `generated_step`, otherwise its `step`.

    Args:
        cheap: the score of the cheap judge, or its call. Scores are numbers, judgements, or mappings with ``score``.
        strong: the call of the strong judge, on the same scale, which is only made for samples that are checked: a
            coroutine, as an async function returns it, or a function without arguments that returns one.
        share: the share of samples that are checked, above 0 and at most 1. The variance of the reward grows with
            (1 - share) / share: below 0.15, it is too large for most groups.
        seed: another seed checks other samples.
        uid: a name of the sample, hashed in place of ``UID\\nSTEP``: for samples without a uid, and functions of lists.

    Returns:
        The judgement. Its components are ``cheap``; ``chance``, the share; ``judged_by``, ``cheap`` or ``strong``; and
        of checked samples ``strong``. Without a verdict of `cheap`, it is *unscored*.

    Raises:
        ServerError: the strong judge gave no verdict on a checked sample, which fails. Its other errors are passed on.
        ConfigError: the share is invalid, or the sample has no uid.
    """
    try:
        if not 0 < share <= 1:
            raise ConfigError(f"share={share}: expected the share of samples to check, above 0 and at most 1")
        chosen = drawn(_name_of_sample() if uid is None else uid, seed) < share
        if not chosen:
            return _combined(_judgement(await _value(cheap)), None, share)
        first, second = await together(map(_value, (cheap, strong() if callable(strong) else strong)))
        return _combined(_judgement(first), _judgement(second), share)
    finally:
        for asked in (cheap, strong):
            # Python warns of a coroutine that was never awaited.
            if inspect.iscoroutine(asked):
                asked.close()


def drawn(name: str, seed: int) -> float:
    """Return a number from 0 to below 1 that depends on a sample's name and a seed only."""
    # Not `hash`, which differs between processes: a repeated call, or a resumed run, must make the same choice.
    digest = hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _name_of_sample() -> str:
    """Return the name of the sample that the function is called for: its uid and step."""
    active = current()
    if active is None or isinstance(active, ActiveBatch) or active.sample.uid is None:
        # A random name would be another one when the function is called again after a failure.
        raise ConfigError("spot_check: there is no single sample with a uid: pass the uid of each as uid")
    step = active.sample.step if active.sample.generated_step is None else active.sample.generated_step
    return f"{active.sample.uid}\n{step}"


async def _value(asked: Any) -> Any:
    return await asked if inspect.isawaitable(asked) else asked


def _judgement(judged: Judged) -> Judgement:
    if isinstance(judged, Judgement):
        return judged
    given: Mapping[str, Any] = judged if isinstance(judged, Mapping) else {"score": judged}
    reply = Reply(str(given.get("explanation", "")))
    score = None if given["score"] is None else float(given["score"])
    why = None if score is not None else reply.text or "it returned no score"
    return Judgement(score, given.get("verdict", score), str(given.get("prompt", "")), reply, why)


def _combined(cheap: Judgement, strong: Judgement | None, chance: float) -> Judgement:
    """Return the judgement of a sample that was checked with this chance; ``strong`` is ``None`` if it was not."""
    if cheap.score is None:
        return cheap
    components: dict[str, Any] = {"cheap": cheap.score, "chance": chance, "judged_by": "cheap"}
    if strong is None:
        return Judgement(cheap.score, cheap.verdict, cheap.prompt, cheap.reply, components=components)
    if strong.score is None:
        raise ServerError(
            f"the strong judge gave no verdict on a sample that it checks, and the cheap score cannot replace it: "
            f"{strong.unscored}"
        )
    components |= {"strong": strong.score, "judged_by": "strong"}
    score = cheap.score + (strong.score - cheap.score) / chance
    reply = Reply(f"[cheap]\n{cheap.reply.text}\n\n[strong]\n{strong.reply.text}")
    return Judgement(score, strong.verdict, strong.prompt, reply, components=components)
