"""Call the user's function for one sample: it ends exactly once, as data."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal

from reward_loop._util.transient import is_refusal, is_transient, retry_after
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    InvalidScoreError,
    JobServiceError,
    LimitError,
    RewardCrashedError,
    RewardFunctionError,
    RewardTimeoutError,
    ScoringError,
    UnscoredError,
)
from reward_loop.limits.isolated import within_reach
from reward_loop.limits.lease import CallLimits, current_limits
from reward_loop.limits.permit import DEFAULT, RETRY, Job
from reward_loop.limits.shared import job_of
from reward_loop.processes.invocation import Call, Ended, describe_exception
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.records import current, waiting_for
from reward_loop.scoring.cache import Cache
from reward_loop.scoring.deadlines import Deadlines, Watched, no_wait
from reward_loop.scoring.isolation import Isolation, in_processes, is_isolated
from reward_loop.scoring.normalise import normalise
from reward_loop.scoring.retry import Retry
from reward_loop.scoring.signature import Target, resolve
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["ScoringFunction"]


class ScoringFunction:
    """A reward function with its signature read, its deadline and its threads.

    Awaiting ``function(sample)`` gives a `RewardResult`, whatever the user's code does: an exception, a deadline that
    passes and an invalid return value are *failed* results. Only cancellation and Ctrl-C propagate.

    Async functions are awaited on the loop, sync ones run in daemon threads; where a sync function returns an
    awaitable, that is awaited on the loop.
    """

    def __init__(
        self,
        function: Any,
        *,
        reward_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = 300.0,
        max_threads: int = 64,
        isolation: Literal["thread", "process"] = "thread",
        max_processes: int | None = None,
        max_memory_mb: int | None = None,
        options: RewardLoopConfig | None = None,
        limit: str = DEFAULT,
    ) -> None:
        """Read the signature.

        Args:
            function: a function, a callable object, or a class or instance with ``compute_score``; or a `Target`, whose
                signature has been read.
            reward_kwargs: configured arguments of the function, or of its class.
            timeout: seconds from the start of the function to its deadline; ``None`` for no deadline.
            max_threads: how many calls of a sync function run at a time; the others wait, and their deadline with them.
            isolation: where a sync function runs that is not marked with `isolated`; see docs/reward-functions.md.
            max_processes: as ``max_threads``, for functions in processes; by default as many as there are cores.
            max_memory_mb: the memory of such a process and what it started; one that passes it is killed.
            options: these five options, and limits, retries, cache and budget beside them.
            limit: which of the limits holds for each call, if it is configured.

        Raises:
            FunctionLoadError: it cannot be called with what the reward loop provides, or not in a process.
            ConfigError: ``limit`` is the one that holds for calls that are made again.
        """
        if limit == RETRY:
            raise ConfigError(f"the limit {RETRY!r} holds for calls that are made again: name another one")
        if options is None:
            options = RewardLoopConfig(
                timeout=timeout,
                max_threads=max_threads,
                isolation=isolation,
                max_processes=max_processes,
                max_memory_mb=max_memory_mb,
            )
        self._options = options
        self._limit = limit
        self._target = function if isinstance(function, Target) else resolve(function, reward_kwargs)
        self._threads = DaemonThreads(options.max_threads)
        self._executor: DaemonThreads | WorkerProcesses = self._threads
        if is_isolated(self._target) or (options.isolation == "process" and not self._target.is_async):
            self._executor = in_processes(self._target, Isolation(options.max_processes, options.max_memory_mb))
        self._retry = Retry(options.retry, _pause)
        self._cache = Cache(options.cache, self._target) if options.cache.enabled else None
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._deadlines: tuple[asyncio.AbstractEventLoop, Deadlines] | None = None
        self._job: tuple[asyncio.AbstractEventLoop, Job] | None = None
        self.timeout = options.timeout

    @property
    def name(self) -> str:
        """Function and file, for messages."""
        return self._target.name

    @property
    def is_async(self) -> bool:
        """Whether it is awaited on the loop."""
        return self._target.is_async

    @property
    def in_processes(self) -> bool:
        """Whether it runs in processes of its own."""
        return isinstance(self._executor, WorkerProcesses)

    @property
    def requires(self) -> frozenset[str]:
        """The fields of a sample that its signature names without a default."""
        return self._target.requires

    @property
    def has_post_process(self) -> bool:
        """Whether the user's class has ``post_process_scores``."""
        return self._target.post_process_scores is not None

    @property
    def has_log(self) -> bool:
        """Whether the user's class has a ``log`` for the rewards of a batch."""
        return self._target.log is not None

    def __repr__(self) -> str:
        where = "async" if self.is_async else "sync"
        if isinstance(self._executor, WorkerProcesses):
            where += f", max_processes={self._executor.max_processes}, max_memory_mb={self._executor.max_memory_mb}"
        return f"ScoringFunction({self.name}, {where}, timeout={self.timeout})"

    def isolate(self, max_processes: int | None = None, max_memory_mb: int | None = None) -> None:
        """Run further calls in processes, whatever was chosen before, unless the function's own mark says how.

        Raises:
            FunctionLoadError: it is async, or cannot be sent to a process.
        """
        self.close()
        self._executor = in_processes(self._target, Isolation(max_processes, max_memory_mb))

    def close(self) -> None:
        """End the processes that the function runs in, if it does and none is at work. A later call starts others."""
        if isinstance(self._executor, WorkerProcesses):
            self._executor.close()

    async def __call__(
        self,
        sample: RewardSample,
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> RewardResult:
        """Score one sample.

        Raises:
            JobServiceError: the service that keeps the limits of all workers cannot be reached.
            ConfigError: the file of the cache cannot be used.
        """
        if sample.error is not None:
            return not_called(sample)
        arguments = self._arguments(sample, reward_router_address, reward_model_tokenizer)
        share = "validate" if sample.validate else "train"
        if self._cache is not None:
            return await self._cached(self._cache, sample, arguments, share)
        return self._result(sample, await self._call(arguments, share))

    async def _cached(self, cache: Cache, sample: RewardSample, arguments: dict[str, Any], share: str) -> RewardResult:
        key = cache.key(arguments)
        known = await cache.get(key)
        if known is not None:
            return RewardResult(Outcome.SCORED, *known, attempts=0)

        async def call() -> Ended:
            ended = await self._call(arguments, share)
            result = self._result(sample, ended)
            if result.score is not None:
                await cache.put(key, result.score, result.extra_info)
            return ended

        return self._result(sample, await cache.once(key, call))

    def _result(self, sample: RewardSample, ended: Ended) -> RewardResult:
        if ended.exception is None and ended.cut_short is None and not ended.described:
            return to_result(ended.value, sample, self._target.name, ended)
        where = f"{describe(sample)}: {self.name}"
        if isinstance(ended.exception, JobServiceError):
            raise ended.exception
        if ended.cut_short is not None:
            result = ended_badly(type(ended.cut_short)(f"{where} {ended.cut_short}"), ended.seconds)
            if isinstance(ended.cut_short, BudgetSpentError):
                result = replace(result, outcome=Outcome.UNSCORED)
        else:
            what = ended.described or f"raised {describe_exception(ended.exception)}"  # type: ignore[arg-type]
            again = f"was called {ended.attempts} times, and at last " if ended.attempts > 1 else ""
            failure = RewardFunctionError(f"{where} {again}{what}")
            failure.__cause__ = ended.exception
            result = ended_badly(failure, ended.seconds)
        return replace(result, attempts=ended.attempts, wait_seconds=ended.waited, queue_seconds=ended.queued)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Apply the class's ``post_process_scores``; without one, the scores stay as they are.

        Raises:
            ScoringError: it raised, ran past the deadline, or did not return one finite number for each score.
        """
        if self._target.post_process_scores is None:
            return scores
        where = f"post_process_scores beside {self.name}"
        call = Call(self._target.post_process_scores, (list(scores),))
        try:
            ended = await self._threads.run(call, self.timeout)
        except TimeoutError:
            raise RewardTimeoutError(f"{where} ran past its deadline of {self.timeout} s") from None
        if ended.exception is not None:
            raise RewardFunctionError(f"{where} raised {describe_exception(ended.exception)}") from ended.exception
        try:
            processed = [normalise(score)[0] for score in ended.value]
        except (InvalidScoreError, TypeError) as error:
            raise InvalidScoreError(f"{where} must return a list of numbers: {error}") from error
        numbers = [score for score in processed if score is not None]
        if len(numbers) != len(scores):
            raise InvalidScoreError(f"{where} was given {len(scores)} scores and returned {len(numbers)} numbers")
        return numbers

    async def log(self, **columns: Any) -> None:
        """Call the class's ``log``, if it has one, with those of the columns that it names.

        Raises:
            ScoringError: it raised, or ran past the deadline.
        """
        if self._target.log is None:
            return
        where = f"log beside {self.name}"
        named = {name: column for name, column in columns.items() if name in self._target.logs}
        try:
            ended = await self._threads.run(Call(self._target.log, (), named), self.timeout)
            if ended.exception is None and inspect.isawaitable(ended.value):
                ended = await self._on_loop(ended.value, self.timeout)
        except TimeoutError:
            raise RewardTimeoutError(f"{where} ran past its deadline of {self.timeout} s") from None
        if ended.exception is not None:
            raise RewardFunctionError(f"{where} raised {describe_exception(ended.exception)}") from ended.exception

    def _arguments(self, sample: RewardSample, router_address: str | None, tokenizer: Any) -> dict[str, Any]:
        passes = self._target.passes
        arguments = dict(self._target.reward_kwargs)
        for name in ("data_source", "solution_str", "ground_truth"):
            if name in passes:
                arguments[name] = getattr(sample, name)
        if "extra_info" in passes:
            arguments["extra_info"] = copied(sample.extra_info)
        if "reward_router_address" in passes:
            arguments["reward_router_address"] = router_address
        if "reward_model_tokenizer" in passes:
            arguments["reward_model_tokenizer"] = tokenizer
        return arguments

    def _job_here(self) -> Job:
        loop = asyncio.get_running_loop()
        if self._job is None or self._job[0] is not loop:
            self._job = (loop, job_of(self._options))
        return self._job[1]

    async def _call(self, arguments: dict[str, Any], share: str) -> Ended:
        """Call the function, and again while it fails in a way that may pass."""
        job = self._job_here()
        started = time.monotonic()
        ended = await self._attempt(job, arguments, share)
        if ended.exception is not None and self._options.retry.max_attempts > 1 and is_transient(ended.exception):
            # Elsewhere: what the further attempts need would be kept for every call that is in flight.
            ended = await self._call_again(job, arguments, share, started, ended)
        return ended

    async def _call_again(self, job: Job, arguments: dict[str, Any], share: str, started: float, first: Ended) -> Ended:
        tries = [first]

        async def attempt() -> Ended:
            tries.append(await self._attempt_again(job, arguments, share, tries[-1]))
            return tries[-1]

        elapsed = time.monotonic() - started
        ended = await self._retry.again(first, attempt, lambda one: one.exception, elapsed)
        ended.attempts = sum(one.attempts for one in tries)
        ended.seconds = sum(one.seconds for one in tries)
        ended.queued = sum(one.queued for one in tries)
        ended.waited = max(0.0, time.monotonic() - started - ended.seconds - ended.queued)
        return ended

    async def _attempt_again(self, job: Job, arguments: dict[str, Any], share: str, last: Ended) -> Ended:
        """Call the function once more, within the limit that holds for that."""
        if RETRY not in job.limited:
            return await self._attempt(job, arguments, share)
        try:
            with waiting_for(current(), f"limit {RETRY!r}"):
                place = await job.enter(RETRY, 0, share)
        except LimitError as error:
            assert last.exception is not None
            why = describe_exception(last.exception)
            return _not_called(LimitError(f"was not called again: {error}. It had raised {why}"))
        try:
            return await self._attempt(job, arguments, share)
        finally:
            place.leave()

    def _attempt(self, job: Job, arguments: dict[str, Any], share: str) -> Coroutine[Any, Any, Ended]:
        """Call the function once, within the limit that holds for every call."""
        limits = CallLimits(job, share, asyncio.get_running_loop())
        # No coroutine in between where nothing is limited: with thousands of calls in flight each counts.
        if job.spent is None and self._limit not in job.limited:
            return self._run(arguments, limits)
        return self._attempt_limited(job, arguments, share, limits)

    async def _attempt_limited(self, job: Job, arguments: dict[str, Any], share: str, limits: CallLimits) -> Ended:
        if job.spent is not None:
            return _not_called(BudgetSpentError(f"was not called: {job.spent}"))
        asked = time.monotonic()
        try:
            with waiting_for(current(), f"limit {self._limit!r}"):
                place = await job.enter(self._limit, 0, share)
        except LimitError as error:
            return _not_called(LimitError(f"was not called: {error}"))
        queued = time.monotonic() - asked
        failure: BaseException | None = None
        try:
            ended = await self._run(arguments, limits)
            failure = ended.exception
        finally:
            if failure is not None and is_refusal(failure):
                place.leave(True, retry_after(failure))
            else:
                place.leave()
        ended.waited += queued
        return ended

    async def _run(self, arguments: dict[str, Any], limits: CallLimits) -> Ended:
        """Run the function. Whatever it does, and a deadline that has passed, is data."""
        token = current_limits.set(limits)
        try:
            if self._target.is_async:
                # As `_on_loop`, without its coroutine: with thousands of calls in flight each counts.
                call = self._start(self._target.call, arguments, self.timeout, limits.waited)
                try:
                    ended = await call.future
                finally:
                    self._leave(call, self.timeout)
            else:
                ended = await self._run_sync(arguments, limits)
        except asyncio.CancelledError:
            limits.give_up()
            raise
        except TimeoutError as error:
            assert self.timeout is not None
            limits.give_up()
            late = RewardTimeoutError(f"ran past its deadline of {self.timeout:g} s{error}")
            return Ended(None, None, self.timeout, cut_short=late, waited=limits.waited(time.monotonic()))
        except RewardCrashedError as error:
            return Ended(None, None, 0.0, cut_short=error)
        except (OSError, RuntimeError) as error:
            # What the function raises is data: this is the system, which has no more descriptors, processes or threads.
            return _not_called(RewardCrashedError(f"could not be called: {type(error).__name__}: {error}"))
        finally:
            current_limits.reset(token)
            if limits.leases:
                limits.release()
        waited = limits.waited(time.monotonic())
        if waited:
            ended.waited = waited
            ended.seconds = max(0.0, ended.seconds - waited)
        return ended

    async def _run_sync(self, arguments: dict[str, Any], limits: CallLimits) -> Ended:
        call, asked = Call(self._target.call, (), arguments), time.monotonic()
        if isinstance(self._executor, DaemonThreads):
            ended = await self._executor.run(call, self.timeout, limits.waited)
        else:
            async with within_reach(limits) as reach:
                ended = await self._executor.run(call, self.timeout, limits.waited, reach)
        queued = max(0.0, time.monotonic() - asked - ended.seconds)
        if ended.exception is None and inspect.isawaitable(ended.value):
            seconds = ended.seconds
            left = None if self.timeout is None else max(0.0, self.timeout - seconds)
            ended = await self._on_loop(ended.value, left, limits.waited)
            ended.seconds += seconds
        ended.queued = queued
        return ended

    async def _on_loop(
        self, value: Awaitable[Any], timeout: float | None, waited: Callable[[float], float] = no_wait
    ) -> Ended:
        call = self._start(lambda: value, {}, timeout, waited)
        try:
            return await call.future
        finally:
            self._leave(call, timeout)

    def _start(
        self,
        function: Callable[..., Awaitable[Any]],
        arguments: dict[str, Any],
        timeout: float | None,
        waited: Callable[[float], float],
    ) -> _OnLoop:
        """Start an async call. Its future gets how it ended, or a `TimeoutError` at its deadline."""
        # A task of its own: user code that swallows its cancellation (`except:` around a retry) is left behind
        # at its deadline, and the sample still ends.
        # By hand, as `asyncio.wait` makes a sample a third dearer, in time and memory, with thousands in flight.
        loop = asyncio.get_running_loop()
        if self._deadlines is None or self._deadlines[0] is not loop:
            self._deadlines = (loop, Deadlines(loop))
        call = _OnLoop(loop.create_future(), waited)
        call.deadlines = self._deadlines[1]
        call.task = loop.create_task(_await(function, arguments, call))
        if timeout is not None:
            call.deadlines.watch(call, timeout)
        return call

    def _leave(self, call: _OnLoop, timeout: float | None) -> None:
        """Nobody waits for an async call any more: if it has not ended, it is cancelled."""
        if timeout is not None:
            call.deadlines.forget(call, timeout)
        if not call.task.done():
            self._abandoned.add(call.task)
            call.task.add_done_callback(self._abandoned.discard)
            call.task.cancel()


async def _pause(seconds: float) -> None:
    with waiting_for(current(), "the pause before the next attempt"):
        await asyncio.sleep(seconds)


class _OnLoop(Watched):
    __slots__ = ("deadlines", "task")
    deadlines: Deadlines
    task: asyncio.Task[None]


async def _await(function: Callable[..., Awaitable[Any]], arguments: dict[str, Any], call: Watched) -> None:
    """Await on the loop. What the user's code raises is data, but for Ctrl-C; nobody reads that of a cancelled call."""
    call.started = time.monotonic()
    started = time.perf_counter()
    value: Any = None
    exception: BaseException | None = None
    try:
        value = await function(**arguments)
    except (KeyboardInterrupt, GeneratorExit):
        call.future.cancel()
        raise
    except BaseException as error:
        exception = error
    if not call.future.done():
        call.future.set_result(Ended(value, exception, time.perf_counter() - started))


def _not_called(reason: ScoringError) -> Ended:
    return Ended(None, None, 0.0, attempts=0, cut_short=reason)


def to_result(returned: Any, sample: RewardSample, name: str, ended: Ended) -> RewardResult:
    """Turn what a function returned for a sample into its result.

    Args:
        returned: what it returned.
        sample: which one, for messages.
        name: of the function, for messages.
        ended: how the call ended.
    """
    problem: ScoringError | None = None
    try:
        score, extra_info = normalise(returned)
        outcome = Outcome.SCORED
        if score is None:
            outcome, problem = Outcome.UNSCORED, UnscoredError(f"{describe(sample)}: {name} gave no score")
    except InvalidScoreError as error:
        score, extra_info, outcome = None, {}, Outcome.FAILED
        problem = InvalidScoreError(f"{describe(sample)}: {name} {error}")
    return RewardResult(
        outcome,
        score,
        extra_info,
        str(problem) if outcome is Outcome.FAILED else None,
        ended.seconds,
        ended.attempts,
        ended.waited,
        problem,
        None,
        ended.queued,
    )


def ended_badly(exception: ScoringError, seconds: float = 0.0) -> RewardResult:
    """Return the result of a sample that failed."""
    return RewardResult(Outcome.FAILED, None, error=str(exception), seconds=seconds, exception=exception)


def failed_after(called: RewardResult, problem: ScoringError) -> RewardResult:
    """Return the result of a sample that failed by what its call returned: what is known of the call stays."""
    return replace(
        called, outcome=Outcome.FAILED, score=None, extra_info={}, error=str(problem), exception=problem, policy=None
    )


def not_called(sample: RewardSample) -> RewardResult:
    """Return the result of a sample whose row is broken."""
    return replace(ended_badly(ScoringError(f"{describe(sample)}: {sample.error}")), attempts=0)


def copied(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's extra info for a function to change as it likes."""
    return {key: _copy(value) for key, value in extra_info.items()}


def _copy(value: Any) -> Any:
    """Copy containers and numpy arrays; share other objects, which `copy.deepcopy` would be slow with, or refuse."""
    kind = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item) for item in value)
    if kind is set:
        return set(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()
    return value


def describe(sample: RewardSample) -> str:
    """Name a sample, for messages."""
    name = f"sample {sample.uid}" if sample.uid is not None else "a sample without uid"
    return f"{name} (data source {sample.data_source!r})" if sample.data_source else name
