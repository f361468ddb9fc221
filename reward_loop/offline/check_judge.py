"""Probes of the judge before a run: wrong answers that it must reject, the same answer again, and in another frame.

`Gap` advises the share of spot checks. A sample that is checked with the chance p has the reward ``c + (s - c) Z / p``,
where Z is 1 with the chance p, else 0: the strong score s plus an error with the mean 0 and the variance
``(s - c)^2 (1 - p) / p``. The advantage is the reward minus the mean of n of them, so its error has the mean square
``(1 - 1/n) E[(s - c)^2] (1 - p) / p``. That of the advantage itself is ``(1 - 1/n) V``, where V is the variance of the
strong scores of answers to a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, variance
from typing import NamedTuple

from reward_loop._util.intervals import wilson
from reward_loop._util.text import shorten
from reward_loop.audit.probes import CANARY, Probe, Probes, question_of
from reward_loop.config import RewardLoopConfig
from reward_loop.offline.check_calls import Calls, CheckedRow, Finding
from reward_loop.types import RewardSample, finite_number

LABELLED_WRONG, LABELLED_RIGHT = "labelled, wrong", "labelled, right"
"""The names of the labelled answers in the report."""

MASTER_KEY = "master_key"
REPEATED_KEYS = 3
"""The largest number of master keys that are asked about for all rows, because the judge accepted them once."""

SEED = 0
"""The seed of the first master key: two checks of the same rows make the same probes."""

LIMIT = 0.1
"""A share of accepted canaries whose confidence interval lies above this is a problem, if `HealthConfig.canaries` is
off."""

ADVICE = {
    "other_answer": "give the judge the question and the reference answer, or use a stronger judge",
    "cut_off": "ask the judge whether the answer is complete, or require a final result by a rule. If answers begin "
    "with the result, leave cut_off out of -O audit.probes",
    LABELLED_WRONG: "read these answers, and change the function so that it rejects them",
}
FENCE = (
    "fence the answer in the prompt (the argument fence of Judge), say that an answer may be empty or without content, "
    "require a final result by a rule before the judge is asked, or use a stronger judge"
)
MISSING = {
    "other_answer": "no two rows are known to have different questions: name -f prompt=... or -f ground_truth=...",
    "question": "the rows have no prompt: name its field, -f prompt=...",
}


Labelled = Sequence[tuple[RewardSample, bool]]
"""Answers with their labels."""


@dataclass(frozen=True, slots=True)
class ProbedKind:
    """The probes of one kind, or of one master key."""

    name: str
    is_canary: bool
    asked: int
    """Those that ended with a score."""
    without_score: int
    positive: int
    """Canaries: those that the judge accepted. Other kinds: scores that agree with the first one."""
    interval: tuple[float, float]
    """The confidence interval of 95 % of the share of positive ones, by Wilson's formula."""
    example: str | None = None
    """The row whose canary was accepted, or whose scores differ."""


@dataclass(frozen=True, slots=True)
class _Asked:
    probe: Probe
    first: CheckedRow
    row: CheckedRow

    def is_positive(self, accept: float | None, tolerance: float) -> bool | None:
        if self.row.score is None:
            return None
        if self.probe.kind in (CANARY, LABELLED_RIGHT):
            return accept is not None and self.row.score >= accept
        return None if self.first.score is None else abs(self.row.score - self.first.score) <= tolerance


def most_calls(rows: int, options: RewardLoopConfig) -> int:
    """Return the largest number of calls of `probe_judge` for rows: each has two master keys, and repeated ones."""
    kinds = _kinds(options)
    return rows * (len(kinds) + (1 + REPEATED_KEYS) * (MASTER_KEY in kinds))


async def probe_judge(
    calls: Calls,
    samples: Sequence[RewardSample],
    first: Sequence[CheckedRow],
    options: RewardLoopConfig,
    concurrency: int,
    labelled: Labelled = (),
) -> tuple[list[ProbedKind], list[Finding]]:
    """Make each kind of probe of ``options.audit.probes`` once for each row, and master keys more often.

    Args:
        calls: calls the function.
        samples: the samples.
        first: their results.
        options: the options of the run; an answer is accepted and scores agree as `AuditConfig` says. By default,
            scores in the upper half of the range of the scores of rows, canaries and labelled answers are accepted.
        concurrency: the largest number of calls in flight.
        labelled: answers with their labels, which are scored, too.
    """
    asked: list[_Asked] = []

    async def ask(probes: Sequence[tuple[int, Probe]]) -> None:
        changed = [
            samples[i] if probe.answer is None else await calls.with_answer(samples[i], probe.answer)
            for i, probe in probes
        ]
        rows = await calls.run_each([replace(sample, is_probe=True) for sample in changed], concurrency)
        asked.extend(_Asked(probe, first[i], row) for (i, probe), row in zip(probes, rows, strict=True))

    await ask([chosen for kind in _kinds(options) for chosen in _choose(kind, samples, options)])
    asked += await _ask_labelled(calls, labelled, concurrency)
    accept, how = _threshold(
        [*first, *(one.row for one in asked if one.probe.kind in (CANARY, LABELLED_RIGHT))], options
    )
    if how is None:
        text = (
            "all answers have the same score, also those that are wrong on purpose: the judge does not distinguish "
            "them. If it should accept none of these, set -O audit.accept=X"
        )
        return [], [Finding("judge", "problem", text)]
    keys = [str(one.probe.answer) for one in asked if one.probe.variant == MASTER_KEY and one.is_positive(accept, 0)]
    repeated = sorted(set(keys), key=keys.count, reverse=True)[:REPEATED_KEYS]
    known = {(one.probe.answer, one.first.uid) for one in asked if one.probe.variant == MASTER_KEY}
    await ask(
        [
            (i, Probe(CANARY, MASTER_KEY, key))
            for key in repeated
            for i in range(len(samples))
            if (key, first[i].uid) not in known
        ]
    )
    names = [*_kinds(options), *((LABELLED_WRONG, LABELLED_RIGHT) if labelled else ())]
    groups = {name: [one for one in asked if name in (one.probe.kind, one.probe.variant)] for name in names}
    if repeated:  # all master keys together would seem to be accepted more often than they are
        keys_asked = groups.pop(MASTER_KEY)
        for key in repeated:
            groups[f"master key {key!r}"] = [one for one in keys_asked if one.probe.answer == key]
        groups["other master keys"] = [one for one in keys_asked if one.probe.answer not in repeated]
    limit = LIMIT if options.health.canaries is None else options.health.canaries
    kinds = [_counted(name, group, accept, options.audit.tolerance) for name, group in groups.items()]
    findings = [_finding(kind, limit, samples) for kind in kinds]
    if (advised := _spot_checks(first, asked, accept)) is not None:
        findings.append(Finding("spot checks", "note", advised))
    return kinds, [Finding("judge", "ok", f"{len(asked)} probes; {how}"), *findings]


def _kinds(options: RewardLoopConfig) -> list[str]:
    return [kind for kind in options.audit.probes if kind != "order"]


def _choose(kind: str, samples: Sequence[RewardSample], options: RewardLoopConfig) -> list[tuple[int, Probe]]:
    """Return the index of each sample to which a kind of probe applies, with its probe."""
    probes = Probes(options.audit.model_copy(update={"probes": (kind,)}), in_groups=False, generator=Random(SEED))
    order = list(enumerate(samples))
    # All of them first: the first row, too, needs a row whose answer is another one.
    for sample in samples:
        probes.remember(sample)
    found = []
    # In the other direction, most rows get another key than before.
    for i, sample in [*order, *reversed(order)] if kind == MASTER_KEY else order:
        if (probe := probes.choose(sample)) is not None:
            found.append((i, probe))
        probes.remember(sample)  # the answer to another question is that of the row before
    return found


async def _ask_labelled(calls: Calls, answers: Labelled, concurrency: int) -> list[_Asked]:
    samples = [await calls.with_answer(sample, sample.solution_str) for sample, _ in answers]
    rows = await calls.run_each(samples, concurrency)
    probes = [Probe(LABELLED_RIGHT) if label else Probe(CANARY, LABELLED_WRONG) for _, label in answers]
    return [_Asked(probe, row, row) for probe, row in zip(probes, rows, strict=True)]


def _spot_checks(first: Sequence[CheckedRow], asked: Sequence[_Asked], accept: float | None) -> str | None:
    """Return what share of spot checks to choose, from rows with both scores, or from the labelled answers."""
    # A function of the user may return anything under these names.
    both = [(finite_number(row.components.get("cheap")), finite_number(row.components.get("strong"))) for row in first]
    pairs = [(cheap, strong) for cheap, strong in both if cheap is not None and strong is not None]
    if pairs:
        return advice(pairs, "rows that both scored")
    labels = {LABELLED_RIGHT: 1.0, LABELLED_WRONG: 0.0}
    judged = [(one.is_positive(accept, 0), labels.get(one.probe.variant or one.probe.kind)) for one in asked]
    known = [(float(accepted), label) for accepted, label in judged if accepted is not None and label is not None]
    return advice(known, "labelled answers (the labels stand for the strong judge)")


def _threshold(rows: Sequence[CheckedRow], options: RewardLoopConfig) -> tuple[float | None, str | None]:
    """Return the lowest accepted score, and a text about it; ``None`` if all scores are equal."""
    if (accept := options.audit.accept) is not None:
        return accept, f"an answer with a score of at least {accept:g} is accepted"
    scores = sorted({row.score for row in rows if row.score is not None})
    if len(scores) < 2:
        return None, None
    middle = (scores[0] + scores[-1]) / 2
    text = f"an answer with a score above {middle:.4g}, the middle of the scores, is accepted (-O audit.accept=X)"
    return next((score for score in scores if score > middle), scores[-1]), text


def _counted(name: str, asked: Sequence[_Asked], accept: float | None, tolerance: float) -> ProbedKind:
    results = [(one, one.is_positive(accept, tolerance)) for one in asked]
    known = [(one, result) for one, result in results if result is not None]
    positive = sum(result for _, result in known)
    is_canary = any(one.probe.kind == CANARY for one in asked)
    example = next((one.first.uid for one, result in known if result == is_canary), None)
    interval = wilson(positive, len(known)) if known else (0.0, 1.0)
    return ProbedKind(name, is_canary, len(known), len(asked) - len(known), positive, interval, example)


def _finding(found: ProbedKind, limit: float, samples: Sequence[RewardSample]) -> Finding:
    if not found.asked:
        missing = MISSING.get(found.name, "no probe ended with a score")
        if found.name == "other_answer" and len({question_of(sample.prompt) for sample in samples} - {None}) == 1:
            missing = "all rows have the same question: add rows with other questions"
        return Finding(found.name, "skipped", missing)
    share = f"{found.positive} of {found.asked} ({found.positive / found.asked:.0%})"
    example = "" if found.example is None else f", such as {shorten(found.example)}"
    if found.name == LABELLED_RIGHT:
        rejected = "" if found.example is None else f"; it rejects {shorten(found.example)}"
        return Finding(found.name, "note" if rejected else "ok", f"the judge accepts {share}{rejected}")
    if not found.is_canary:
        if found.positive == found.asked:
            return Finding(found.name, "ok", "the same scores")
        return Finding(
            found.name, "note", f"{share} have the same score{example}. -O audit.tolerance=X allows differences"
        )
    if not found.positive:
        return Finding(found.name, "ok", f"none of {found.asked} accepted")
    text = f"the judge accepts {share}{example}"
    if found.interval[0] > limit:
        return Finding(found.name, "problem", f"{text}: {ADVICE.get(found.name, FENCE)}")
    return Finding(found.name, "note", f"{text}; use more --rows to find out whether the share is above {limit:.0%}")


MOST_ERROR = 2.0
"""The advised share keeps the error of advantages within this number of standard deviations of the advantages. It is
our choice: a step then tells as much as a fifth of its samples with the strong judge."""

SMALLEST = 0.15
"""The smallest share that is advised: answers on which the judges differ become more frequent during a training."""


class Gap(NamedTuple):
    """How far the scores of a cheap judge are from those of a strong one."""

    square: float
    """The mean squared difference of both scores of an answer."""
    variance: float
    """The variance of the strong judge's scores."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Gap:
        """Return the gap of at least two pairs of a cheap and a strong score."""
        return cls(fmean((strong - cheap) ** 2 for cheap, strong in pairs), variance(strong for _, strong in pairs))

    def error(self, share: float, size: int) -> float:
        """Return the root mean square of the error of an advantage that is not divided by a standard deviation.

        Args:
            share: the share of samples that are checked.
            size: the number of samples of a group.
        """
        return math.sqrt((1 - 1 / size) * self.square * (1 - share) / share)

    def relative_error(self, share: float) -> float:
        """Return this error in standard deviations of the advantages, which depends on no group size."""
        return math.sqrt(self.square * (1 - share) / share / self.variance) if self.variance else math.inf

    def share(self, most: float = MOST_ERROR) -> float:
        """Return the smallest share with a relative error of at most `most`."""
        if not self.square:
            return SMALLEST
        return max(SMALLEST, self.square / (self.square + most**2 * self.variance))


def advice(pairs: Sequence[tuple[float, float]], what: str) -> str | None:
    """Return how a cheap judge differs from a strong one and what share to check; ``None`` if the pairs do not tell.

    Args:
        pairs: the scores of the cheap and of the strong judge.
        what: what the pairs are, for the text.
    """
    if len(pairs) < 2 or not (gap := Gap.of(pairs)).variance:
        return None
    different = sum(cheap != strong for cheap, strong in pairs)

    def worth(share: float) -> str:
        error = gap.relative_error(share)
        return f"{error:.2g} standard deviations, so a step tells as much as {1 / (1 + error**2):.0%} of its samples"

    share = math.ceil(gap.share() * 100) / 100
    return (
        f"the judges differ on {different} of {len(pairs)} {what}. Spot checks of 20% of the samples add an error to "
        f"advantages: {worth(0.2)}. Advised: share={share:g} ({worth(share)})"
    )
