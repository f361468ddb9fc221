"""Proofs: while a function runs in threads or worker processes, known answers show whether its scores are still right.

A scorer can break, for example by one answer, and then return wrong scores without an error. A proof scores a known
right and a known wrong answer of each data source, in the process that scores the samples. The results of a
process wait for its next proof, so a result is used only if a later proof was clean.

=========  ===========================================================================================================
State      Next
=========  ===========================================================================================================
clean      With its first result: suspect
suspect    Holds its results. Proof clean: clean, the results are used. Proof failed, or the process ended: replaced
replaced   Its results are discarded, and the samples scored again elsewhere
=========  ===========================================================================================================

A proof is due after `ProofConfig.every` results for each data source, or when a result has waited for 50 times as long
as a proof takes. So proofs take at most 2 % of the calls, or of the time of the process; up to `_MAX_HOLD_S`, because
groups wait for these results. And it is due at once when all calls in flight wait for proofs: nothing else is computed
then, and a training step must not wait for its last results.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import BrokenScorerError, InvalidScoreError, RewardLoopError
from reward_loop.processes.outcome import CallOutcome
from reward_loop.scoring.results import normalise
from reward_loop.types import RewardSample

__all__ = ["TEMPLATES", "KnownAnswers", "Place", "ProofCounts", "Proofs", "find_pair", "right_answers", "score_of"]

logger = logging.getLogger(__name__)

TEMPLATES = (
    "\\boxed{{{}}}",
    "#### {}",
    "Answer: {}",
    "{}",
    "<answer>{}</answer>",
    "The answer is {}.",
    "The answer is \\boxed{{{}}}.\n#### {}\nAnswer: {}",
    "<think>\nI compute it.\n</think>\n<answer>{}</answer>",
    "<think>\nI compute it.\n</think>\n\\boxed{{{}}}",
    "<think>\nI compute it.\n</think>\n<answer>\\boxed{{{}}}</answer>",
)
"""The forms in which a reference answer is tried as an answer."""

MAX_SOURCES = 16
"""The largest number of data sources that are proven."""

_SHARE = 0.02
"""The part of the time of a process that proofs may take."""
_MIN_HOLD_S, _MAX_HOLD_S = 0.02, 10.0
"""The shortest and the longest time that a result waits until its proof is due."""
_MAX_PROOF_S = 1.0
"""A data source whose proof takes longer is not proven."""
_TRYING_S = 60.0
"""Seconds within which the templates of a data source must have been tried."""
_MAX_TEXTS = 4


@dataclass(slots=True)
class ProofCounts:
    """What the proofs of one or more functions have found since the last time."""

    made: int = 0
    """The number of proofs, each of one data source."""
    failed: int = 0
    rescored: int = 0
    """The results that were discarded, and whose samples were scored again."""
    replaced: int = 0
    """The processes that were replaced. The threads of a process count as one."""
    unproven: int = 0
    """The data sources for which no template distinguishes a right answer from a wrong one."""

    def __add__(self, other: ProofCounts) -> ProofCounts:
        return ProofCounts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {f"reward_loop/proofs/{name}": float(getattr(self, name)) for name in self.__slots__}


class Place:
    """A process that scores samples, with its results since its start, or since its last clean proof."""

    __slots__ = ("due", "has_failed", "is_due", "is_proving", "is_replaced", "loop", "results", "since", "timer")

    def __init__(self, due: Callable[[], None]) -> None:
        self.due = due
        """Called when a proof is due."""
        self.is_replaced = self.is_proving = self.is_due = self.has_failed = False
        self.results: list[tuple[asyncio.Future[CallOutcome], CallOutcome]] = []
        """The results that wait for the next proof, each with the future that gets it."""
        self.since = 0.0
        """The time of the first of them, by `time.monotonic`."""
        self.timer: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the results."""

    def take(self) -> list[tuple[asyncio.Future[CallOutcome], CallOutcome]]:
        """Return the results so far; later ones wait for the next proof."""
        taken, self.results, self.is_due = self.results, [], False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return taken

    def end(self, error: BrokenScorerError | None = None, *, trusts_first: bool = False) -> int:
        """End the place and discard its results, or raise ``error`` for them; return their number.

        Each end of a process must call it, whatever its cause: the samples would wait for their results indefinitely.

        Args:
            error: stops the run.
            trusts_first: whether to use a single result, before which the place was clean, unless a proof has failed.
        """
        self.is_replaced = True
        results = self.take()
        is_used = trusts_first and len(results) == 1 and not self.has_failed
        _settle(results, is_used, error)
        return 0 if is_used else len(results)


def _settle(
    results: Sequence[tuple[asyncio.Future[CallOutcome], CallOutcome]],
    is_clean: bool,
    error: BrokenScorerError | None = None,
) -> None:
    for future, outcome in results:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            outcome.is_discarded = not is_clean
            future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """A right answer and a wrong one of a data source."""

    right: RewardSample
    wrong: RewardSample
    score: float
    """The score of the right answer."""
    wrong_score: float
    """The score of the wrong answer, which is smaller."""

    @property
    def gap(self) -> float:
        """The difference of the scores."""
        return self.score - self.wrong_score


Score = Callable[[RewardSample], Awaitable[float | None]]
"""Scores an answer of a proof in one process; returns ``None`` if it has no score."""


class Proofs:
    """The known answers of one function, and its proofs.

    Args:
        every: the number of results of a process, for each data source, after which a proof is due.
        name: the function's name in messages.
    """

    def __init__(self, every: int, name: str) -> None:
        self.every = every
        self.limit = 0
        """The number of results of a process after which a proof is due; 0 without any known answers."""
        self.counts = ProofCounts()
        self._name = name
        self.labelled: Sequence[tuple[RewardSample, bool]] = ()
        """Answers and whether they are right, which are used before those made from the ground truth."""
        self.pairs: dict[str, KnownAnswers] = {}
        """The known answers, by data source."""
        self._ready: dict[str, asyncio.Task[None]] = {}
        self._truths: dict[str, list[Any]] = {}
        self.tried: set[str] = set()
        """The data sources for which answers have been looked for."""
        self._seconds = 0.0
        self._in_flight = 0
        """The number of calls of samples that have not returned, those whose results wait for a proof included."""
        self._holding: set[Place] = set()
        """The places with results that wait."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def hold_s(self) -> float:
        """Seconds for which a result waits until its proof is due."""
        return min(max(self._seconds / _SHARE, _MIN_HOLD_S), _MAX_HOLD_S)

    def take(self) -> ProofCounts:
        """Return the counts since the last call, and start again from zero."""
        taken, self.counts = self.counts, ProofCounts()
        return taken

    async def ready(self, sample: RewardSample, score: Score) -> None:
        """Wait until answers for the sample's data source have been looked for, once, before its first sample."""
        source = sample.data_source
        task = self._ready.get(source)
        if task is None or task.cancelled():
            if len(self._ready) >= MAX_SOURCES:
                return
            task = self._ready[source] = self.start(self._try(source, sample, score))
        if not task.done():
            self._truths.setdefault(source, []).append(sample.ground_truth)
            # The task serves all samples of the source: one that is cancelled must not end it.
            await asyncio.shield(task)

    def start(self, work: Any) -> asyncio.Task[Any]:
        """Start a task that the proofs own; it belongs to no sample."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin(self) -> None:
        """Count the call of a sample; `end` follows."""
        self._in_flight += 1

    def end(self) -> None:
        """Count the end of the call of a sample."""
        self._in_flight -= 1
        if self._holding:
            self._prove_if_idle()

    def _prove_if_idle(self) -> None:
        """Let all proofs become due if no call computes: all wait for proofs."""
        held = 0
        for place in self._holding:
            held += len(place.results)
        if not held:
            self._holding.clear()
        elif self._in_flight <= held:
            for place in self._holding:
                if place.results and not place.is_due and place.loop is not None:
                    place.is_due = True
                    place.loop.call_soon(place.due)

    def hold(self, place: Place, future: asyncio.Future[CallOutcome], outcome: CallOutcome) -> None:
        """Have a result wait for the next proof. `Place.due` is called when it has waited for `hold_s`."""
        loop = future.get_loop()
        if place.loop is not loop:  # an object may be used in several loops in turn; nobody waits for older results
            place.loop, place.timer, place.results = loop, None, []
        place.results.append((future, outcome))
        if place.timer is None:
            place.since = time.monotonic()
            # One timer for the oldest result: a proof settles all results of the place.
            place.timer = loop.call_later(self.hold_s, self._become_due, place)
        self._holding.add(place)
        self._prove_if_idle()

    def is_due(self, place: Place, next_seconds: float = 0.0) -> bool:
        """Return whether a place must be proven now, before its next call, which may take ``next_seconds``."""
        if not place.results:
            return False
        if place.is_due or len(place.results) >= self.limit:
            return True
        return next_seconds > 0 and time.monotonic() + next_seconds - place.since > self.hold_s

    def _become_due(self, place: Place) -> None:
        place.is_due = True
        place.due()

    async def prove(self, place: Place, score: Score, *, raising_fails: bool) -> str | None:
        """Prove a place. If it is clean, its results so far are used. Otherwise, return what was wrong.

        The caller then ends the place; the results still wait.

        Args:
            place: the place.
            score: scores an answer there.
            raising_fails: whether an exception of the function is a failure of the proof.
        """
        # Failed until it is proven: a proof that is cancelled has shown nothing.
        results, place.has_failed = place.take(), True
        started = time.monotonic()
        problem: str | None = "the proof did not end"
        try:
            problem = await self._problem(score, raising_fails)
        finally:  # also if the proof is cancelled: `Place.end` must find the results
            if problem is not None:
                place.results = results + place.results
        if problem is None:
            self._seconds = time.monotonic() - started
            place.has_failed = False
            _settle(results, True)
        else:
            self.counts.failed += 1
        return problem

    async def _problem(self, score: Score, raising_fails: bool) -> str | None:
        for source, pair in list(self.pairs.items()):
            self.counts.made += 1
            found = [await score(answer) for answer in (pair.right, pair.wrong)]
            right, wrong = found
            if right is None or wrong is None:
                if raising_fails:
                    return f"data source {source!r}: a known answer has no score"
            # Half: a score with some noise still passes, and one that no longer tells the answers apart does not.
            elif right - wrong < pair.gap / 2:
                answers = [shorten(answer.solution_str) for answer in (pair.right, pair.wrong)]
                return (
                    f"data source {source!r}: the right answer {answers[0]} scored {right:g}, the wrong answer "
                    f"{answers[1]} scored {wrong:g}"
                )
        return None

    async def _try(self, source: str, sample: RewardSample, score: Score) -> None:
        """Find a right and a wrong answer for a data source."""
        await asyncio.sleep(0)  # for the other samples that are submitted now
        try:
            async with asyncio.timeout(_TRYING_S):
                why = await self._find(source, sample, score)
        except TimeoutError:
            why = f"the function takes longer than {_TRYING_S:g} s"
        except (RewardLoopError, OSError, RuntimeError) as error:
            why = str(error)
        finally:
            self.tried.add(source)
            self._truths.pop(source, None)
        if why is not None:
            self.counts.unproven += 1
            logger.info(
                "%s, data source %r: its scores are not proven, see docs/proofs.md: %s", self._name, source, why
            )

    async def _find(self, source: str, sample: RewardSample, score: Score) -> str | None:
        """Add the known answers of a data source, or return why there are none."""
        labelled = [one for one in self.labelled if one[0].data_source == source]
        found = await _labelled_pair(labelled, score) or await find_pair(sample, self._truths.get(source, ()), score)
        if isinstance(found, str):
            return found
        answers = (found.right, found.wrong)
        started = time.monotonic()
        # A function with random scores would fail its proofs by chance.
        again = [await score(answer) for answer in answers]
        seconds = time.monotonic() - started
        if again != [found.score, found.wrong_score]:
            return "the function does not return the same score again"
        # Proofs are made again and again, and samples wait for them.
        if seconds > _MAX_PROOF_S:
            return f"a proof takes {seconds:.1f} s"
        self._seconds = max(self._seconds, seconds)
        self.pairs[source] = found
        self.limit = self.every * len(self.pairs)
        return None


async def _labelled_pair(labelled: Sequence[tuple[RewardSample, bool]], score: Score) -> KnownAnswers | None:
    """Return the labelled right answer with the largest score, and the wrong one with the smallest, if that is less."""
    known: dict[bool, list[tuple[float, RewardSample]]] = {True: [], False: []}
    for label, found in known.items():
        for answer in [answer for answer, its_label in labelled if its_label is label][:_MAX_TEXTS]:
            if (scored := await score(answer)) is not None:
                found.append((scored, answer))
    right = max(known[True], key=lambda one: one[0], default=None)
    wrong = min(known[False], key=lambda one: one[0], default=None)
    if right is None or wrong is None or right[0] <= wrong[0]:
        return None
    return KnownAnswers(right[1], wrong[1], right[0], wrong[0])


async def find_pair(sample: RewardSample, truths: Sequence[Any], score: Score) -> KnownAnswers | str:
    """Return a right and a wrong answer that a function distinguishes, or why there are none.

    Args:
        sample: the sample with the ground truth of the answers, and the other arguments of the function.
        truths: ground truths of other samples, whose right answers are wrong ones here.
        score: calls the function.
    """
    if sample.ground_truth is None:
        return "its samples have no ground truth"
    texts = list(_texts(sample.ground_truth))[:_MAX_TEXTS]
    others = [text for truth in truths for text in _texts(truth) if text not in texts][:2]

    async def scored(template: str, text: str) -> float | None:
        return await score(_answer(sample, template, text))

    best: KnownAnswers | None = None
    for text in texts:
        rights = await asyncio.gather(*(scored(template, text) for template in TEMPLATES))
        known = [(right, template) for right, template in zip(rights, TEMPLATES, strict=True) if right is not None]
        for right, template in sorted(known, key=lambda one: -one[0])[:3]:
            if best is not None and right <= best.score:
                break
            for other in (*others, _another(text)):
                wrong = await scored(template, other)
                if wrong is not None and wrong < right:
                    pair = _answer(sample, template, text), _answer(sample, template, other)
                    best = KnownAnswers(*pair, right, wrong)
                    break
        if best is not None and best.score >= 1.0:
            break
    return best or "no answer made from the ground truth scores more than a wrong one"


def right_answers(sample: RewardSample) -> list[str]:
    """Return what may be right answers to a sample: the likeliest text of its ground truth, in each form."""
    text = next(_texts(sample.ground_truth), "")
    return [_answer(sample, template, text).solution_str for template in TEMPLATES]


def _answer(sample: RewardSample, template: str, text: str) -> RewardSample:
    answer = template.format(*[text] * template.count("{}"))
    cut_off = None if sample.is_truncated is None else False
    return replace(
        sample, solution_str=answer, uid="proof", group=None, turns=None, is_truncated=cut_off, is_probe=True
    )


def score_of(outcome: CallOutcome) -> float | None:
    """Return the score of an answer of a proof, or ``None`` if the call has none."""
    if outcome.exception is not None or outcome.error is not None:
        return None
    try:
        return normalise(outcome.value)[0]
    except InvalidScoreError:
        return None


def _texts(truth: Any) -> Iterator[str]:
    """Yield texts that may be the answer within a ground truth, the likeliest first."""
    if isinstance(truth, bool) or truth is None:
        yield str(truth)
    elif isinstance(truth, str):
        yield truth
        for pattern in (r"####\s*(.+?)\s*$", r"\\boxed\{(.*)\}", r"<answer>\s*(.*?)\s*</answer>"):
            if found := re.search(pattern, truth, re.DOTALL):
                yield found[1]
    elif isinstance(truth, Mapping):
        for value in truth.values():
            yield from _texts(value)
    elif isinstance(truth, Sequence) or hasattr(truth, "tolist"):
        items = truth.tolist() if hasattr(truth, "tolist") else truth
        for item in items if isinstance(items, list | tuple) else [str(items)]:
            yield from _texts(item)
    else:
        yield str(truth)


def _another(text: str) -> str:
    """Return a text of the same kind that is another answer: its last digit or letter is changed."""
    for place in range(len(text) - 1, -1, -1):
        if text[place].isdigit():
            return f"{text[:place]}{'7' if text[place] != '7' else '3'}{text[place + 1 :]}"
    if len(text) == 1:
        return "B" if text != "B" else "C"
    return text[::-1] if text[::-1] != text else text + "x"
