"""Call the user's function for one sample: it ends exactly once, as data."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import (
    BudgetSpentError,
    InvalidScoreError,
    JobServiceError,
    LimitError,
    RewardFunctionError,
    RewardTimeoutError,
    ScoringError,
    UnscoredError,
)
from reward_loop.scoring.cache import Cache
from reward_loop.scoring.job import DEFAULT, Job, job_of
from reward_loop.scoring.limit import Call, current_call
from reward_loop.scoring.normalise import normalise
from reward_loop.scoring.retry import Retry, is_refusal, is_transient, retry_after
from reward_loop.scoring.signature import resolve
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["ScoringFunction"]

_TRACEBACK_FRAMES = 3
_MESSAGE_CHARACTERS = 500


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
        options: RewardLoopConfig | None = None,
    ) -> None:
        """Read the signature.

        Args:
            function: a function, a callable object, or a class or instance with ``compute_score``.
            reward_kwargs: configured arguments of the function, or of its class.
            timeout: seconds from the start of the function to its deadline; ``None`` for no deadline.
            max_threads: how many calls of a sync function run at a time; the others wait, and their deadline with them.
            options: all of these options, and limits, retries, cache and budget beside them.

        Raises:
            FunctionLoadError: it cannot be called with what the reward loop provides.
        """
        self._options = options or RewardLoopConfig(timeout=timeout, max_threads=max_threads)
        self._target = resolve(function, reward_kwargs)
        self._threads = DaemonThreads(self._options.max_threads)
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._retry = Retry(self._options.retry)
        self._cache = Cache(self._options.cache, self._target) if self._options.cache.enabled else None
        self._job: tuple[asyncio.AbstractEventLoop, Job] | None = None
        self.timeout = self._options.timeout

    @property
    def name(self) -> str:
        """Function and file, for messages."""
        return self._target.name

    @property
    def is_async(self) -> bool:
        """Whether it is awaited on the loop."""
        return self._target.is_async

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
        return f"ScoringFunction({self.name}, {'async' if self.is_async else 'sync'}, timeout={self.timeout})"

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
        """
        if sample.error is not None:
            return _ended_badly(ScoringError(f"{_describe(sample)}: {sample.error}"), _NOT_CALLED)
        arguments = self._arguments(sample, reward_router_address, reward_model_tokenizer)
        share = "validate" if sample.validate else "train"
        if self._cache is None:
            ended = await self._call(arguments, share)
        else:
            key = self._cache.key(arguments)
            known = await self._cache.get(key)
            if known is not None:
                return RewardResult(Outcome.SCORED, *known, attempts=0)
            ended = await self._cache.once(key, lambda: self._call(arguments, share))
        result = self._result(sample, ended)
        if self._cache is not None and result.score is not None:
            await self._cache.put(key, result.score, result.extra_info)
        return result

    def _result(self, sample: RewardSample, ended: _Ended) -> RewardResult:
        where = f"{_describe(sample)}: {self.name}"
        again = f", {ended.attempts} times" if ended.attempts > 1 else ""
        failure: ScoringError
        if ended.timed_out:
            return _ended_badly(RewardTimeoutError(f"{where} ran past its deadline of {self.timeout:g} s"), ended)
        if isinstance(ended.exception, JobServiceError):
            raise ended.exception
        if isinstance(ended.exception, BudgetSpentError):
            spent = BudgetSpentError(f"{where} was not called: {ended.exception}")
            return replace(_ended_badly(spent, ended), outcome=Outcome.UNSCORED)
        if ended.exception is not None:
            failure = RewardFunctionError(f"{where} raised{again} {_describe_exception(ended.exception)}")
            failure.__cause__ = ended.exception
            return _ended_badly(failure, ended)
        try:
            score, extra_info = normalise(ended.value)
        except InvalidScoreError as error:
            return _ended_badly(InvalidScoreError(f"{where} {error}"), ended)
        unscored = None if score is not None else UnscoredError(f"{where} gave no score")
        return RewardResult(
            Outcome.SCORED if unscored is None else Outcome.UNSCORED,
            score,
            extra_info,
            seconds=ended.seconds,
            attempts=ended.attempts,
            wait_seconds=ended.waited,
            exception=unscored,
        )

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Apply the class's ``post_process_scores``; without one, the scores stay as they are.

        Raises:
            ScoringError: it raised, ran past the deadline, or did not return one finite number for each score.
        """
        if self._target.post_process_scores is None:
            return scores
        where = f"post_process_scores beside {self.name}"
        call = functools.partial(_call, self._target.post_process_scores, (list(scores),), {})
        try:
            ended = await self._threads.run(call, self.timeout)
        except TimeoutError:
            raise RewardTimeoutError(f"{where} ran past its deadline of {self.timeout} s") from None
        if ended.exception is not None:
            raise RewardFunctionError(f"{where} raised {_describe_exception(ended.exception)}") from ended.exception
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
            ended = await self._threads.run(functools.partial(_call, self._target.log, (), named), self.timeout)
            if ended.exception is None and inspect.isawaitable(ended.value):
                ended = await self._within(_await(lambda: ended.value), self.timeout)
        except TimeoutError:
            raise RewardTimeoutError(f"{where} ran past its deadline of {self.timeout} s") from None
        if ended.exception is not None:
            raise RewardFunctionError(f"{where} raised {_describe_exception(ended.exception)}") from ended.exception

    def _arguments(self, sample: RewardSample, router_address: str | None, tokenizer: Any) -> dict[str, Any]:
        passes = self._target.passes
        arguments = dict(self._target.reward_kwargs)
        for name in ("data_source", "solution_str", "ground_truth"):
            if name in passes:
                arguments[name] = getattr(sample, name)
        if "extra_info" in passes:
            arguments["extra_info"] = {key: _copy(value) for key, value in sample.extra_info.items()}
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

    async def _call(self, arguments: dict[str, Any], share: str) -> _Ended:
        """Call the function, and again while it fails in a way that may pass."""
        job = self._job_here()
        started = time.monotonic()
        ended = await self._attempt(job, arguments, share)
        if ended.exception is None or self._options.retry.max_attempts == 1 or not is_transient(ended.exception):
            return ended
        tries = [ended]

        async def attempt() -> _Ended:
            tries.append(await self._attempt(job, arguments, share))
            return tries[-1]

        ended = await self._retry.again(ended, attempt, lambda one: one.exception, elapsed=time.monotonic() - started)
        seconds = sum(one.seconds for one in tries)
        return replace(
            ended,
            seconds=seconds,
            waited=time.monotonic() - started - seconds,
            attempts=sum(one.attempts for one in tries),
        )

    async def _attempt(self, job: Job, arguments: dict[str, Any], share: str) -> _Ended:
        if job.spent is not None:
            return replace(_NOT_CALLED, exception=BudgetSpentError(job.spent))
        if DEFAULT not in job.limited:
            return await self._run(arguments, Call(job, share, asyncio.get_running_loop()))
        asked = time.monotonic()
        try:
            place = await job.enter(DEFAULT, 0, share)
        except LimitError as error:
            return replace(_NOT_CALLED, exception=error, waited=time.monotonic() - asked)
        waited = time.monotonic() - asked
        error: BaseException | None = None
        try:
            ended = await self._run(arguments, Call(job, share, asyncio.get_running_loop()))
            error = ended.exception
        finally:
            if error is not None and is_refusal(error):
                place.leave(True, retry_after(error))
            else:
                place.leave()
        ended.waited += waited
        return ended

    async def _run(self, arguments: dict[str, Any], call: Call) -> _Ended:
        """Run the function once. Its exceptions are data, and so is a deadline that has passed."""
        try:
            if self._target.is_async:
                ended = await self._within(_await(lambda: self._target.call(**arguments), call), self.timeout, call)
            else:
                run = functools.partial(_call, self._target.call, (), arguments, call)
                ended = await self._threads.run(run, self.timeout, call.waited)
                if ended.exception is None and inspect.isawaitable(ended.value):
                    value, seconds = ended.value, ended.seconds
                    left = None if self.timeout is None else max(0.0, self.timeout - seconds)
                    ended = await self._within(_await(lambda: value, call), left, call)
                    ended.seconds += seconds
        except TimeoutError:
            assert self.timeout is not None
            ended = _Ended(None, None, self.timeout, timed_out=True)
        finally:
            if call.leases:
                call.release()
        ended.waited = call.waited(time.monotonic())
        return ended

    async def _within(
        self, running: Coroutine[Any, Any, _Ended], timeout: float | None, call: Call | None = None
    ) -> _Ended:
        # A task of its own: user code that swallows its cancellation (`except:` around a retry) is left behind
        # at its deadline, and the sample still ends.
        # By hand, as `asyncio.wait` makes a sample a third dearer, in time and memory, with thousands in flight.
        loop = asyncio.get_running_loop()
        task = loop.create_task(running)
        waiter = loop.create_future()
        wake = functools.partial(_wake, waiter)
        task.add_done_callback(wake)
        timer = None if timeout is None else loop.call_later(timeout, wake)
        extended = 0.0
        try:
            await waiter
            # Time spent waiting for a limit is given back, as often as it takes.
            while call is not None and not task.done() and (waited := call.waited(time.monotonic())) > extended:
                waiter = loop.create_future()
                wake = functools.partial(_wake, waiter)
                task.add_done_callback(wake)
                timer = loop.call_later(waited - extended, wake)
                extended = waited
                await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if not task.done():
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
                task.cancel()
        if task in self._abandoned:
            raise TimeoutError
        return task.result()


@dataclass(slots=True)
class _Ended:
    """How a call ended."""

    value: Any
    exception: BaseException | None
    seconds: float
    waited: float = 0.0
    attempts: int = 1
    timed_out: bool = False


_NOT_CALLED = _Ended(None, None, 0.0, attempts=0)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call | None = None
) -> _Ended:
    """Call in this thread. Nothing is raised: not even SystemExit may end the thread, or the process."""
    current_call.set(call)
    started = time.perf_counter()
    try:
        value, exception = function(*args, **kwargs), None
    except BaseException as error:
        value, exception = None, error
    return _Ended(value, exception, _worked(started, call))


def _worked(started: float, call: Call | None) -> float:
    seconds = time.perf_counter() - started
    return seconds if call is None else max(0.0, seconds - call.waited(time.monotonic()))


def _wake(waiter: asyncio.Future[None], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _await(start: Callable[[], Any], call: Call | None = None) -> _Ended:
    """Await on the loop. The user's exceptions are data; our own cancellation and Ctrl-C are not."""
    current_call.set(call)
    started = time.perf_counter()
    value: Any = None
    exception: BaseException | None = None
    try:
        value = await start()
    except (Exception, SystemExit) as error:
        exception = error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        exception = error
    return _Ended(value, exception, _worked(started, call))


def _ended_badly(exception: ScoringError, ended: _Ended) -> RewardResult:
    return RewardResult(
        Outcome.FAILED,
        None,
        error=str(exception),
        seconds=ended.seconds,
        attempts=ended.attempts,
        wait_seconds=ended.waited,
        exception=exception,
    )


def _copy(value: Any) -> Any:
    """Copy containers and numpy arrays; share other objects, which `copy.deepcopy` would be slow with, or refuse."""
    kind = type(value)
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item) for item in value)
    if kind is set:
        return set(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()
    return value


def _describe(sample: RewardSample) -> str:
    name = f"sample {sample.uid}" if sample.uid is not None else "a sample without uid"
    return f"{name} (data source {sample.data_source!r})" if sample.data_source else name


def _describe_exception(error: BaseException) -> str:
    """Type, message, and the last lines of user code that it passed."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "..."
    ours = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    tail = "".join(traceback.format_list(frames[-_TRACEBACK_FRAMES:])).rstrip()
    return f"{type(error).__name__}: {message}" + (f"\n{tail}" if tail else "")
