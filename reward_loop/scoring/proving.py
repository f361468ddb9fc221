"""`Proving`: where the proofs of a function run, and what happens if one fails."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from reward_loop._util.text import counted
from reward_loop.errors import BrokenScorerError, FunctionLoadError, RewardCrashedError
from reward_loop.processes.outcome import CallOutcome, outcome_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.records.events import HealthRecords
from reward_loop.scoring.options import ScoringOptions
from reward_loop.scoring.proofs import Place, Proofs, score_of
from reward_loop.scoring.signature import Target
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import RewardSample

__all__ = ["Proving"]

logger = logging.getLogger(__name__)

_THREADS = 4
"""The number of threads of proofs. Samples that wait for a thread must not delay them."""

_MAX_S = 60.0
"""The deadline of each call of a proof, in seconds: results wait for it."""


class Proving:
    """The proofs of one function, in the threads of this process or in worker processes (`processes.pool.Prover`).

    Args:
        target: the function.
        options: its options.
        isolate: moves the function into worker processes; raises `FunctionLoadError` if it cannot run there.
    """

    def __init__(
        self, target: Target, options: ScoringOptions, isolate: Callable[[int | None, int | None], None]
    ) -> None:
        assert options.proofs.every is not None
        self.proofs = Proofs(options.proofs.every, target.name)
        self.timeout = min(options.timeout or _MAX_S, _MAX_S)
        self._target = target
        self._options = options
        self._isolate = isolate
        self._threads = DaemonThreads(_THREADS)
        self._threads_place = Place(self._become_due)
        self._error: BrokenScorerError | None = None
        self.step: int | None = None
        """The training step of the latest sample."""
        self.pool: WorkerProcesses | None = None
        """The worker processes in which the function runs; ``None`` if it runs in threads."""

    async def ready(self, sample: RewardSample) -> None:
        """Wait until answers for the sample's data source have been looked for."""
        await self.proofs.ready(sample, self._score)

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
        proofs, place = self.proofs, self._threads_place
        if not proofs.limit or outcome.exception is not None or future.done():
            return False
        if place.is_replaced:
            # The function cannot move into processes: its later results are as doubtful as those that failed.
            if self._error is not None:
                future.set_exception(self._error)
                return True
            outcome.is_discarded = True
            return False
        proofs.hold(place, future, outcome)
        if len(place.results) >= proofs.limit:
            self._become_due()
        return True

    def _become_due(self) -> None:
        place = self._threads_place
        if not place.is_proving and not place.is_replaced:
            place.is_proving = True
            self.start(self._prove_threads(place))

    async def _prove_threads(self, place: Place) -> None:
        problem = None
        try:
            while True:
                for _ in range(2):  # once more, before the run stops or the function moves
                    problem = await self.proofs.prove(place, self._score_in_thread, raising_fails=False)
                    if problem is None:
                        break
                if problem is not None or not self.proofs.is_due(place):
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
            self.proofs.counts.replaced += 1
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
        if not self.proofs.limit or outcome.exception is not None or outcome.error is not None:
            return None
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self.proofs.hold(place, future, outcome)
        return future

    def is_due(self, place: Place, next_seconds: float, is_last: bool) -> bool:
        """Return whether a worker process must be proven before its next call, which may take ``next_seconds``.

        Before it is replaced, too, unless it has returned only one result since it was clean: see `ended`.
        """
        return self.proofs.is_due(place, next_seconds) if not is_last else len(place.results) > 1

    async def prove(self, place: Place, score: Callable[[Mapping[str, Any]], Awaitable[CallOutcome]]) -> bool:
        """Prove a worker process, and return whether it is clean. If not, the pool replaces it."""

        async def score_answer(answer: RewardSample) -> float | None:
            return score_of(await score(self._arguments(answer)))

        problem = await self.proofs.prove(place, score_answer, raising_fails=True)
        if problem is not None:
            self._warn(
                f"a worker process of {self._target.name} failed a proof, so its scores may be wrong: {problem}. The "
                f"process is replaced; {counted(len(place.results), 'sample')} will be scored again"
            )
        return problem is None

    def ended(self, place: Place) -> None:
        """Discard the results of an ended worker process that no proof has confirmed."""
        if place.end(trusts_first=True):
            self.proofs.counts.replaced += 1

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        """Start a task that belongs to no sample."""
        return self.proofs.start(work)
