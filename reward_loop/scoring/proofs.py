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
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_loop._util.text import counted, shorten
from reward_loop.errors import (
    BrokenScorerError,
    FunctionLoadError,
    InvalidScoreError,
    RewardCrashedError,
    RewardLoopError,
)
from reward_loop.processes.outcome import CallOutcome, outcome_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.records.events import HealthRecords
from reward_loop.scoring.known_answers import KnownAnswers, Score, find_pair, labelled_pair
from reward_loop.scoring.options import ScoringOptions
from reward_loop.scoring.results import normalise
from reward_loop.scoring.signature import Target
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import RewardSample

logger = logging.getLogger(__name__)

MAX_SOURCES = 16
"""The largest number of data sources that are proven: each adds two calls to every proof."""

_SHARE = 0.02
"""The part of the time of a process that proofs may take."""
_MIN_HOLD_S, _MAX_HOLD_S = 0.02, 10.0
"""The shortest and the longest time that a result waits until its proof is due."""
_MAX_PROOF_S = 1.0
"""A data source whose proof takes longer is not proven."""
_TRYING_S = 60.0
"""Seconds within which the templates of a data source must have been tried."""
_THREADS = 4
"""The number of threads of proofs. Samples that wait for a thread must not delay them."""
_MAX_S = 60.0
"""The deadline of each call of a proof, in seconds: results wait for it."""


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


class Proofs:
    """The known answers of one function, and its proofs in the threads of this process or in worker processes.

    For the latter, it is a `processes.pool.Prover`.

    Args:
        target: the function.
        options: its options.
        isolate: moves the function into worker processes; raises `FunctionLoadError` if it cannot run there.
    """

    def __init__(
        self, target: Target, options: ScoringOptions, isolate: Callable[[int | None, int | None], None]
    ) -> None:
        self._target = target
        self._options = options
        self._isolate = isolate
        self.timeout = min(options.timeout or _MAX_S, _MAX_S)
        self.limit = 0
        """The number of results of a process after which a proof is due; 0 without any known answers."""
        self.counts = ProofCounts()
        self.step: int | None = None
        """The training step of the latest sample."""
        self.pool: WorkerProcesses | None = None
        """The worker processes in which the function runs; ``None`` if it runs in threads."""
        self._threads = DaemonThreads(_THREADS)
        self._threads_place = Place(self._threads_are_due)
        self._error: BrokenScorerError | None = None
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
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def hold_s(self) -> float:
        """Seconds for which a result waits until its proof is due."""
        return min(max(self._seconds / _SHARE, _MIN_HOLD_S), _MAX_HOLD_S)

    def take(self) -> ProofCounts:
        """Return the counts since the last call, and start again from zero."""
        taken, self.counts = self.counts, ProofCounts()
        return taken

    async def ready(self, sample: RewardSample) -> None:
        """Wait until answers for the sample's data source have been looked for, once, before its first sample."""
        source = sample.data_source
        task = self._ready.get(source)
        if task is None or task.cancelled():
            if len(self._ready) >= MAX_SOURCES:
                return
            task = self._ready[source] = self.start(self._try(source, sample))
        if not task.done():
            self._truths.setdefault(source, []).append(sample.ground_truth)
            # The task serves all samples of the source: one that is cancelled must not end it.
            await asyncio.shield(task)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that the proofs own; it belongs to no sample."""
        # In a sample's context, the limits and the record of that sample would count these calls.
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

    def _hold(self, place: Place, future: asyncio.Future[CallOutcome], outcome: CallOutcome) -> None:
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

    def is_due(self, place: Place, next_seconds: float = 0.0, is_last: bool = False) -> bool:
        """Return whether a place must be proven now, before its next call, which may take ``next_seconds``.

        Before a process is replaced, too, unless it has returned only one result since it was clean: see `ended`.
        """
        if is_last:
            return len(place.results) > 1
        if not place.results:
            return False
        if place.is_due or len(place.results) >= self.limit:
            return True
        return next_seconds > 0 and time.monotonic() + next_seconds - place.since > self.hold_s

    def _become_due(self, place: Place) -> None:
        place.is_due = True
        place.due()

    async def _prove(self, place: Place, score: Score, *, raising_fails: bool) -> str | None:
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
        # A copy: answers for another data source may be found meanwhile.
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

    async def _try(self, source: str, sample: RewardSample) -> None:
        """Find a right and a wrong answer for a data source."""
        await asyncio.sleep(0)  # for the other samples that are submitted now
        try:
            async with asyncio.timeout(_TRYING_S):
                why = await self._find(source, sample)
        except TimeoutError:
            why = f"the function takes longer than {_TRYING_S:g} s"
        # The latter two: the system has no more processes or threads.
        except (RewardLoopError, OSError, RuntimeError) as error:
            why = str(error)
        finally:
            self.tried.add(source)
            self._truths.pop(source, None)
        if why is not None:
            self.counts.unproven += 1
            logger.info(
                "%s, data source %r: its scores are not proven, see docs/proofs.md: %s", self._target.name, source, why
            )

    async def _find(self, source: str, sample: RewardSample) -> str | None:
        """Add the known answers of a data source, or return why there are none."""
        labelled = [one for one in self.labelled if one[0].data_source == source]
        truths = self._truths.get(source, ())
        found = await labelled_pair(labelled, self._score) or await find_pair(sample, truths, self._score)
        if isinstance(found, str):
            return found
        answers = (found.right, found.wrong)
        started = time.monotonic()
        # A function with random scores would fail its proofs by chance.
        again = [await self._score(answer) for answer in answers]
        seconds = time.monotonic() - started
        if again != [found.score, found.wrong_score]:
            return "the function does not return the same score again"
        # Proofs are made again and again, and samples wait for them.
        if seconds > _MAX_PROOF_S:
            return f"a proof takes {seconds:.1f} s"
        self._seconds = max(self._seconds, seconds)
        self.pairs[source] = found
        self.limit = (self._options.proofs.every or 0) * len(self.pairs)
        return None

    async def _score(self, answer: RewardSample) -> float | None:
        if self.pool is None:
            return await self._score_in_thread(answer)
        try:
            return score_of(await self.pool.score_proof(self._arguments(answer), self.timeout))
        except (TimeoutError, RewardCrashedError):
            return None

    def _arguments(self, answer: RewardSample) -> dict[str, Any]:
        return self._target.arguments(answer, None, None)

    # In threads

    def hold_in_threads(self, future: asyncio.Future[CallOutcome], outcome: CallOutcome) -> bool:
        """Have the outcome of a thread wait for the next proof; return false if it needs none."""
        place = self._threads_place
        if not self.limit or outcome.exception is not None or future.done():
            return False
        if place.is_replaced:
            # The function cannot move into processes: its later results are as doubtful as those that failed.
            if self._error is not None:
                future.set_exception(self._error)
                return True
            outcome.is_discarded = True
            return False
        self._hold(place, future, outcome)
        if len(place.results) >= self.limit:
            self._threads_are_due()
        return True

    def _threads_are_due(self) -> None:
        place = self._threads_place
        if not place.is_proving and not place.is_replaced:
            place.is_proving = True
            self.start(self._prove_threads(place))

    async def _prove_threads(self, place: Place) -> None:
        problem = None
        try:
            while True:
                for _ in range(2):  # once more, before the run stops or the function moves
                    problem = await self._prove(place, self._score_in_thread, raising_fails=False)
                    if problem is None:
                        break
                if problem is not None or not self.is_due(place):
                    break
        except Exception as error:
            problem = f"the proof could not be made: {error!r}"
        finally:
            place.is_proving = False
        if problem is not None:
            self._replace_threads(place, problem)

    def _replace_threads(self, place: Place, problem: str) -> None:
        why = f"{self._target.name} failed a proof, so its scores may be wrong: {problem}"
        try:
            if self._options.proofs.in_threads == "stop":
                raise FunctionLoadError("reward_loop.proofs.in_threads=stop")
            self._isolate(self._options.max_processes, self._options.max_memory_mb)
        except FunctionLoadError as error:
            self._error = BrokenScorerError(
                f"{why}. An answer may have changed the state of this process. Set isolation=process: worker processes "
                f"that fail a proof are replaced. ({error})"
            )
            self._warn(str(self._error))
            place.end(self._error)
        else:
            self.counts.replaced += 1
            self._warn(
                f"{why}. The function now runs in worker processes; {counted(len(place.results), 'sample')} will be "
                "scored again"
            )
            place.end()

    def _warn(self, message: str) -> None:
        """Log that a proof has failed, and record it as a warning, which the report and the viewer show."""
        logger.error("%s", message)
        if self._options.log_dir:
            warning = {"step": self.step, "monitor": "proofs", "subject": self._target.name, "message": message}
            HealthRecords(self._options.log_dir).write_warnings([warning])

    async def _score_in_thread(self, answer: RewardSample) -> float | None:
        call = functools.partial(outcome_of, self._target.call, self._arguments(answer))
        try:
            async with asyncio.timeout(self.timeout):
                outcome = await self._threads.run(call)
        except TimeoutError:
            return None
        # Otherwise Python warns of a coroutine that was never awaited.
        if inspect.iscoroutine(outcome.value):
            outcome.value.close()
        return score_of(outcome)

    # In worker processes

    def new_place(self, due: Callable[[], None]) -> Place:
        """Return the place of a new worker process."""
        return Place(due)

    def is_suspect(self, place: Place) -> bool:
        """Return whether a worker process has returned results since its last proof."""
        return bool(place.results)

    def hold(self, place: Place, outcome: CallOutcome) -> asyncio.Future[CallOutcome] | None:
        """Have the outcome of a worker process wait for the next proof; return ``None`` if it needs none."""
        if not self.limit or outcome.exception is not None or outcome.error is not None:
            return None
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self._hold(place, future, outcome)
        return future

    async def prove(self, place: Place, score: Callable[[Mapping[str, Any]], Awaitable[CallOutcome]]) -> bool:
        """Prove a worker process, and return whether it is clean. If not, the pool replaces it."""

        async def score_answer(answer: RewardSample) -> float | None:
            return score_of(await score(self._arguments(answer)))

        problem = await self._prove(place, score_answer, raising_fails=True)
        if problem is not None:
            self._warn(
                f"a worker process of {self._target.name} failed a proof, so its scores may be wrong: {problem}. The "
                f"process is replaced; {counted(len(place.results), 'sample')} will be scored again"
            )
        return problem is None

    def ended(self, place: Place) -> None:
        """Discard the results of an ended worker process that no proof has confirmed."""
        if place.end(trusts_first=True):
            self.counts.replaced += 1


def score_of(outcome: CallOutcome) -> float | None:
    """Return the score of an answer of a proof, or ``None`` if the call has none."""
    if outcome.exception is not None or outcome.error is not None:
        return None
    try:
        return normalise(outcome.value)[0]
    except InvalidScoreError:
        return None
