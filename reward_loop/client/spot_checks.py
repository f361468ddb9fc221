"""Spot checks: a cheap judge scores every answer, a strong judge a random share of them, and the reward has the mean of
the strong judge's scores.

Invariants, without which the mean differs from the strong judge's, and a policy gains by deceiving the cheap one:

- The choice depends on nothing that a judge said. It is the same when the function is called again after a failure.
- A chosen answer gets a reward only with the strong judge's verdict. The cheap score never stands in for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from reward_loop._util.bounded_tasks import together
from reward_loop._util.intervals import FALSE_ACCEPT
from reward_loop.client.chat import Reply
from reward_loop.client.judge import Judgement
from reward_loop.errors import ConfigError, ServerError
from reward_loop.records import ActiveBatch, ActiveSample, current

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
        check_share(share, allow_small_share)
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


def drawn(name: str, seed: int) -> float:
    """Return a number from 0 to below 1 that depends on a sample's name and a seed only."""
    # Not `hash`, which differs between processes: a repeated call, or a resumed run, must make the same choice.
    digest = hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


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


def _name_of(active: ActiveSample | None) -> str:
    """Return the name of the sample that the function is called for: its uid and step.

    A sample without a uid gets a random name, which it keeps when the function is called again.
    """
    if active is None:
        return secrets.token_hex(8)
    if isinstance(active, ActiveBatch):
        raise ConfigError("spot_check: the function is called for several samples: pass the uid of each as uid")
    sample = active.sample
    if sample.uid is None:
        random_name: str = active.__dict__.setdefault("random_name", secrets.token_hex(8))
        return random_name
    step = sample.step if sample.generated_step is None else sample.generated_step
    return f"{sample.uid}\n{step}"


async def _value(asked: Any) -> Any:
    return await asked if inspect.isawaitable(asked) else asked


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
