"""Spot checks: a cheap judge scores every answer, a strong judge a random share of them, and the reward has the mean of
the strong judge's scores.

Invariants, without which the mean differs from the strong judge's, and a policy gains by deceiving the cheap one:

- The choice depends on nothing that a judge said. It is the same when the function is called again after a failure.
- A chosen answer gets a reward only with the strong judge's verdict. The cheap score never stands in for it.
- Equal answers share a verdict, but never a choice that was made for one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import secrets
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

from reward_loop._util.bounded_tasks import together
from reward_loop._util.intervals import FALSE_ACCEPT
from reward_loop._util.transient import is_transient
from reward_loop.client.chat import Reply
from reward_loop.client.judge import Judgement
from reward_loop.errors import BudgetSpentError, ConfigError, ServerError
from reward_loop.records import ActiveBatch, ActiveSample, current
from reward_loop.types import RewardSample

SMALLEST_SHARE = 0.15
"""Smaller shares must be asked for: the variance of the reward grows with (1 - share) / share."""

Judged = Judgement | Mapping[str, Any] | float
"""What a judge returns: a `Judgement`, a number, or a mapping with ``score``, as a reward function returns it."""


async def spot_check(
    cheap: Judged | Awaitable[Judged],
    strong: Awaitable[Judged] | Callable[[], Awaitable[Judged]],
    share: float = 0.2,
    *,
    seed: int = 0,
    accept: float = 0.5,
    uid: str | None = None,
    allow_small_share: bool = False,
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
        share: the share of samples that are checked, above 0 and at most 1.
        seed: another seed checks other samples.
        accept: the smallest score of an answer that a judge accepts, to count the wrong answers that `cheap` accepts.
        uid: a name of the sample, hashed in place of ``UID\\nSTEP``: outside of a reward manager, and in processes.
        allow_small_share: accept a share below 0.15, whose rewards vary too much for most groups.

    Returns:
        The judgement. Its components are ``cheap``; ``chance``, the share; ``judged_by``, ``cheap`` or ``strong``; of
        checked samples also ``strong`` and, if it rejects the answer, ``false_accept``: 1 if `cheap` accepts it, else
        0. Without a verdict of `cheap`, it is *unscored*.

    Raises:
        ServerError: the strong judge gave no verdict on a checked sample, which fails. Its other errors are passed on.
        ConfigError: the share or another argument is invalid.
    """
    try:
        _check(share, allow_small_share)
        if isinstance(strong, asyncio.Future):
            raise ConfigError("spot_check: strong is a task, which runs already: pass the coroutine or a function")
        chosen = drawn(_name_of(current()) if uid is None else uid, seed) < share
        if not chosen:
            return _combined(_judgement(await _value(cheap)), None, share, accept)
        first, second = await together(map(_value, (cheap, strong() if callable(strong) else strong)))
        return _combined(_judgement(first), _judgement(second), share, accept)
    finally:
        for asked in (cheap, strong):
            # Python warns of a coroutine that was never awaited.
            if inspect.iscoroutine(asked):
                asked.close()


async def escalate(
    answers: Sequence[str],
    cheap: Callable[[str], Judged | Awaitable[Judged]],
    strong: Callable[[str], Judged | Awaitable[Judged]],
    *,
    key: Callable[[str], Hashable],
    share: float = 0.2,
    seed: int = 0,
    accept: float = 0.5,
    uids: Sequence[str] | None = None,
    allow_small_share: bool = False,
) -> list[dict[str, Any] | Exception]:
    """Score the answers to one prompt by a cheap judge, and check some *distinct* answers by a strong one, without
    bias. For a function of the manager ``group``.

        async def compute_score(solution_strs, extra_infos, reward_router_address):
            question = extra_infos[0]["question"]
            return await escalate(
                solution_strs,
                lambda answer: cheap(reward_router_address, question=question, answer=answer),
                lambda answer: strong(question=question, answer=answer),
                key=final_answer,
            )

    Answers with the same key share one call of the strong judge, and its verdict. A key is checked with a chance
    proportional to the number of its answers, at most 1, so that the expected number of calls is ``share`` times the
    number of answers. The score is that of `spot_check` with this chance. If no answer repeats, each has the chance
    ``share``; if the calls suffice for all keys, all scores are the strong judge's.

    Args:
        answers: the answers to the prompt.
        cheap: returns the score of an answer by the cheap judge, or its call.
        strong: the same for the strong judge; called with the first answer of each key that is checked.
        key: returns what a verdict depends on, such as the final answer of a response; ``None`` if there is none: such
            an answer is equal to no other.
        share: the expected number of calls of the strong judge for each answer, above 0 and at most 1.
        seed, accept, allow_small_share: see `spot_check`.
        uids: the names of the samples; by default the uids of the samples that the function is called for. Required in
            worker processes.

    Returns:
        What the function returns for each answer: a dict with the components of `spot_check`; or the error of an answer
        whose judge failed.

    Raises:
        ConfigError: an argument is invalid, or does not fit the samples that the function is called for.
        BudgetSpentError: the budget is spent.
        Exception: a judge failed, and the error is transient, so that the function is called again.
    """
    _check(share, allow_small_share)
    if not answers:
        return []
    names = _names_of(current(), len(answers)) if uids is None else list(uids)
    if len(names) != len(answers):
        raise ConfigError(f"escalate: {len(answers)} answers, and {len(names)} uids: expected one for each answer")
    members: dict[Hashable, list[int]] = {}
    for index, answer in enumerate(answers):
        found = key(answer)
        members.setdefault(_Unequal() if found is None else found, []).append(index)
    groups = list(members.values())
    chance = dict(zip(range(len(groups)), chances([len(group) for group in groups], share), strict=True))
    # The smallest name: the order of samples may differ when the function is called again.
    checked = [i for i, group in enumerate(groups) if drawn(min(names[j] for j in group), seed) < chance[i]]
    calls = [(cheap, answer) for answer in answers] + [(strong, answers[groups[i][0]]) for i in checked]
    results: list[Any] = await together(_caught(judge, answer) for judge, answer in calls)
    judged, verdicts = results[: len(answers)], dict(zip(checked, results[len(answers) :], strict=True))
    rewards: list[dict[str, Any] | Exception] = [{}] * len(answers)
    for i, group in enumerate(groups):
        for index in group:
            error = next((one for one in (judged[index], verdicts.get(i)) if isinstance(one, Exception)), None)
            if error is not None and is_transient(error):
                raise error
            try:
                rewards[index] = error or _combined(judged[index], verdicts.get(i), chance[i], accept).reward()
            except ServerError as without_verdict:
                rewards[index] = without_verdict
    return rewards


def chances(counts: Sequence[int], share: float) -> list[float]:
    """Return the chance of each key to be checked: proportional to its count, at most 1.

    The chances add up to ``share`` times the sum of the counts, or are all 1. None is below ``share``.

    Args:
        counts: the number of answers with each key.
        share: the expected number of calls for each answer.
    """
    found = [1.0] * len(counts)
    calls, left = share * sum(counts), sum(counts)
    for place in sorted(range(len(counts)), key=lambda i: -counts[i]):
        if calls * counts[place] < left:  # so have all later ones, whose counts are not larger
            found[place] = calls / left * counts[place]
        else:
            calls, left = calls - 1, left - counts[place]
    return found


def drawn(name: str, seed: int) -> float:
    """Return a number from 0 to below 1 that depends on a sample's name and a seed only."""
    # Not `hash`, which differs between processes: a repeated call, or a resumed run, must make the same choice.
    digest = hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


class _Unequal:
    """A key that is equal to no other."""


def check_share(share: float, allow_small: bool) -> None:
    """Check the share of samples that are checked.

    Raises:
        ConfigError: it is not a share, or a small one that is not asked for.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share={share}: expected the share of samples to check, above 0 and at most 1")
    if share < SMALLEST_SHARE and not allow_small:
        raise ConfigError(
            f"share={share}: below {SMALLEST_SHARE}, rewards vary too much for most groups (from {1 - 1 / share:.3g} "
            f"to {1 / share:.3g} for scores from 0 to 1). Choose a larger share, or set allow_small_share=True"
        )


def _check(share: float, allow_small: bool) -> None:
    check_share(share, allow_small)


def _name_of(active: ActiveSample | None) -> str:
    """Return the name of the sample that the function is called for: its uid and step.

    A sample without a uid gets a random name, which it keeps when the function is called again.
    """
    if active is None:
        return secrets.token_hex(8)
    if isinstance(active, ActiveBatch):
        raise ConfigError(
            "spot_check: the function is called for several samples: pass the uid of each as uid, or use escalate"
        )
    return _name(active.sample, active)


def _names_of(active: ActiveSample | None, count: int) -> list[str]:
    """Return the names of the samples that the function is called for, in the order of its arguments."""
    if not isinstance(active, ActiveBatch):
        return [secrets.token_hex(8) for _ in range(count)]
    return [_name(sample, active, index) for index, sample in enumerate(active.received)]


def _name(sample: RewardSample, active: ActiveSample, index: int = 0) -> str:
    """Return the name of a sample of an active call: the one at this index, if there are several."""
    if sample.uid is None:
        random_name: str = active.__dict__.setdefault("random_name", secrets.token_hex(8))
        return f"{random_name}\n{index}"
    step = sample.step if sample.generated_step is None else sample.generated_step
    return f"{sample.uid}\n{step}"


async def _value(asked: Any) -> Any:
    return await asked if inspect.isawaitable(asked) else asked


async def _caught(judge: Callable[[str], Any], answer: str) -> Judgement | Exception:
    try:
        return _judgement(await _value(judge(answer)))
    except (ConfigError, BudgetSpentError):  # these concern all answers
        raise
    except Exception as error:
        return error


def _judgement(judged: Judged) -> Judgement:
    if isinstance(judged, Judgement):
        return judged
    given: Mapping[str, Any] = judged if isinstance(judged, Mapping) else {"score": judged}
    reply = Reply(str(given.get("explanation", "")))
    score = given["score"]
    if score is None:
        return Judgement(None, None, str(given.get("prompt", "")), reply, reply.text or "it returned no score")
    return Judgement(float(score), given.get("verdict", score), str(given.get("prompt", "")), reply)


def _combined(cheap: Judgement, strong: Judgement | None, chance: float, accept: float) -> Judgement:
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
    if strong.score < accept:
        components[FALSE_ACCEPT] = float(cheap.score >= accept)
    score = cheap.score + (strong.score - cheap.score) / chance
    reply = Reply(f"[cheap]\n{cheap.reply.text}\n\n[strong]\n{strong.reply.text}")
    return Judgement(score, strong.verdict, strong.prompt, reply, components=components)
