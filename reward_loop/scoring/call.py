"""Call the user's function for one sample. Every sample gets exactly one result, also when the function fails.

The call path of a sample. Each step makes one decision and returns a `CallOutcome`; only `__call__` and `_cached`
convert it to a `RewardResult`:

    __call__         cached? `_cached` merges equal calls, and reads and writes stored scores
                     retried? `_retried` makes further attempts, by `_call_again` under the limit `retry`
      _call_once     limited? `_call_with_permit` acquires the function's limit first
        _run         where? on the event loop, or by `_run_sync` in a thread or a process

Without cache, limit and retry, a sample in flight has one coroutine each of `__call__` and `_run`: with 20,000 samples
in flight, the garbage collector takes about 1.5 us per sample for each of its objects. So `__call__` and `_cached`
repeat the lines that start retries: a coroutine of their own would take 0.3 KB more per sample in flight.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    LimitError,
    RewardCrashedError,
    RewardTimeoutError,
)
from reward_loop.limits.client import open_limits
from reward_loop.limits.lease import CallScope, current_scope
from reward_loop.limits.permit import DEFAULT, RETRY, Limits
from reward_loop.limits.server import CallServer
from reward_loop.processes.invocation import CallOutcome, Invocation, describe_exception
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.records import current
from reward_loop.scoring.cache import Cache
from reward_loop.scoring.hooks import Hooks
from reward_loop.scoring.isolation import Isolation, in_processes, is_isolated
from reward_loop.scoring.on_loop import LoopCalls
from reward_loop.scoring.outcome import not_called, to_result
from reward_loop.scoring.retry import Retry
from reward_loop.scoring.signature import Target, resolve
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["ScoringFunction"]


class _Unset:
    """The type of the sentinel for "not given": the value is then taken from the options."""

    def __repr__(self) -> str:
        return "<as in RewardLoopConfig>"


_UNSET: Any = _Unset()


class ScoringFunction:
    """Calls the user's reward function for single samples, with a deadline, retries, limits and a cache.

    ``await function(sample)`` returns a `RewardResult`. An exception in the user's code, a passed deadline and an
    invalid return value become *failed* results. Cancellation, Ctrl-C and the errors listed at `__call__` propagate.

    Async functions are awaited on the event loop. Sync functions run in daemon threads, or in worker processes; if a
    sync function returns an awaitable, it is awaited on the event loop.

    Example::

        function = ScoringFunction(compute_score, timeout=60)
        result = await function(RewardSample("2+2=4", ground_truth="4"))
    """

    def __init__(
        self,
        function: Any,
        *,
        reward_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = _UNSET,
        max_threads: int = _UNSET,
        isolation: Literal["thread", "process"] = _UNSET,
        max_processes: int | None = _UNSET,
        max_memory_mb: int | None = _UNSET,
        options: RewardLoopConfig | None = None,
        limit: str = DEFAULT,
        limits: Limits | None = None,
    ) -> None:
        """Inspect the function's signature.

        Args:
            function: a function, a callable object, or a class or instance with ``compute_score``; or a `Target`
                returned by `resolve`.
            reward_kwargs: configured arguments of the function, or of its class.
            timeout: seconds from the start of the function to its deadline (default 300); ``None`` for no deadline.
            max_threads: the maximum number of concurrent calls of a sync function (default 64). The deadline of a
                queued call does not start until the function starts.
            isolation: where sync functions run that are not marked with `isolated` (default ``"thread"``); see
                docs/isolation.md.
            max_processes: the maximum number of concurrent calls in worker processes; by default the number of cores.
            max_memory_mb: the memory limit (in 2^20 bytes) of a worker process with its child processes; a process
                that exceeds it is killed.
            options: all options, including these five; cannot be combined with them.
            limit: the name of the limit that each call acquires; ignored if no such limit is configured.
            limits: limits and budget shared with other functions; the caller closes them. By default the function
                creates its own from ``options``, and closes them.

        Raises:
            FunctionLoadError: the function requires an argument that the reward loop does not provide, or cannot run
                in a process.
            ConfigError: ``limit`` is the limit for retries, two arguments exclude each other, the cache file cannot be
                opened, or the address of the limiter service is invalid.
        """
        if limit == RETRY:
            raise ConfigError(f"the limit {RETRY!r} is reserved for retries: name another limit")
        own: dict[str, Any] = {
            "timeout": timeout,
            "max_threads": max_threads,
            "isolation": isolation,
            "max_processes": max_processes,
            "max_memory_mb": max_memory_mb,
        }
        own = {name: value for name, value in own.items() if value is not _UNSET}
        if options is None:
            options = RewardLoopConfig(**own)
        elif own:
            name, value = next(iter(own.items()))
            raise ConfigError(
                f"ScoringFunction: {name}={value!r} and options={type(options).__name__}(...) are both given: set "
                f"{name} in the options"
            )
        if reward_kwargs and isinstance(function, Target):
            raise ConfigError(f"reward_kwargs have no effect: the signature of {function.name} has been read already")
        self._options = options
        self._limit = limit
        self._target = function if isinstance(function, Target) else resolve(function, reward_kwargs)
        self._threads = DaemonThreads(options.max_threads)
        self._executor: DaemonThreads | WorkerProcesses = self._threads
        if is_isolated(self._target) or (options.isolation == "process" and not self._target.is_async):
            self._executor = in_processes(self._target, Isolation(options.max_processes, options.max_memory_mb))
        self._retry = Retry(options.retry)
        self._cache = Cache(options.cache, self._target) if options.cache.enabled else None
        self._loop_calls = LoopCalls()
        self._hooks = Hooks(self._target, self._threads, self._loop_calls)
        self._owns_limits = limits is None
        self.limits = open_limits(options) if limits is None else limits
        self._processes = CallServer()
        self.timeout = options.timeout

    @property
    def name(self) -> str:
        """The function's name and file, for messages."""
        return self._target.name

    @property
    def is_async(self) -> bool:
        """Whether the function is awaited on the event loop."""
        return self._target.is_async

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        return isinstance(self._executor, WorkerProcesses)

    @property
    def requires(self) -> frozenset[str]:
        """The provided arguments that the function's signature declares without a default."""
        return self._target.requires

    @property
    def has_post_process(self) -> bool:
        """Whether the user's class has ``post_process_scores``."""
        return self._target.post_process_scores is not None

    @property
    def has_log(self) -> bool:
        """Whether the user's class has a ``log`` hook for the rewards of a batch."""
        return self._target.log is not None

    def __repr__(self) -> str:
        where = "async" if self.is_async else "sync"
        if isinstance(self._executor, WorkerProcesses):
            where += f", max_processes={self._executor.max_processes}, max_memory_mb={self._executor.max_memory_mb}"
        return f"ScoringFunction({self.name}, {where}, timeout={self.timeout})"

    def isolate(self, max_processes: int | None = None, max_memory_mb: int | None = None) -> None:
        """Run all further calls in worker processes. Values set by `isolated` on the function take precedence.

        Raises:
            FunctionLoadError: the function is async, or cannot be pickled.
        """
        self._close_processes()
        self._executor = in_processes(self._target, Isolation(max_processes, max_memory_mb))

    def close(self) -> None:
        """Stop the idle worker processes, and close the limits that the function created itself.

        The fork server is stopped too if no call is in flight. A later call starts new processes and reopens the
        limits.
        """
        self._close_processes()
        if self._owns_limits:
            self.limits.close()

    def _close_processes(self) -> None:
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
            JobServiceError: the limiter service is unreachable.
            ConfigError: the cache file cannot be read.
        """
        if sample.error is not None:
            return not_called(sample)
        try:
            arguments = self._target.arguments(sample, reward_router_address, reward_model_tokenizer)
        except RecursionError:
            return not_called(replace(sample, error="its extra_info is nested too deeply, or contains itself"))
        traffic_class = "validate" if sample.validate else "train"
        if self._cache is not None:
            return await self._cached(self._cache, sample, arguments, traffic_class)
        started = time.monotonic()
        outcome = await self._call_once(arguments, traffic_class)
        if self._retry.applies_to(outcome):
            outcome = await self._retried(outcome, started, arguments, traffic_class)
        return to_result(outcome, sample, self._target.name)

    async def _cached(
        self, cache: Cache, sample: RewardSample, arguments: dict[str, Any], traffic_class: str
    ) -> RewardResult:
        key = cache.key(arguments)
        known = await cache.get(key)
        if known is not None:
            return RewardResult(Outcome.SCORED, *known, attempts=0)

        async def call() -> CallOutcome:
            started = time.monotonic()
            outcome = await self._call_once(arguments, traffic_class)
            if self._retry.applies_to(outcome):
                outcome = await self._retried(outcome, started, arguments, traffic_class)
            result = to_result(outcome, sample, self._target.name)
            if result.score is not None:
                await cache.put(key, result.score, result.extra_info)
            return outcome

        return to_result(await cache.once(key, call), sample, self._target.name)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Return the scores after the class's ``post_process_scores``, or unchanged if the class has none.

        Raises:
            ScoringError: the method raised, ran past the deadline, or did not return one finite number per score.
        """
        return await self._hooks.post_process_scores(scores, self.timeout)

    async def log(self, **columns: Any) -> None:
        """Call the class's ``log``, if it has one, with the columns that it declares.

        Raises:
            ScoringError: ``log`` raised, or ran past the deadline.
        """
        await self._hooks.log(columns, self.timeout)

    def _retried(
        self, first: CallOutcome, started: float, arguments: dict[str, Any], traffic_class: str
    ) -> Awaitable[CallOutcome]:
        """Call the function again after a first call, which started at ``started``, failed with a transient error."""
        again = functools.partial(self._call_again, arguments, traffic_class)
        return self._retry.again(first, again, started)

    async def _call_again(
        self, arguments: dict[str, Any], traffic_class: str, attempt: int, last: CallOutcome
    ) -> CallOutcome:
        """Call the function once more, under the limit for retries if one is configured."""
        if RETRY not in self.limits.max_waits:
            return await self._call_once(arguments, traffic_class, attempt)
        try:
            permit = await self.limits.enter(RETRY, 0, traffic_class)
        except LimitError as error:
            assert last.exception is not None
            why = describe_exception(last.exception)
            return CallOutcome.without_call(LimitError(f"was not called again: {error}. It had raised {why}"))
        try:
            return await self._call_once(arguments, traffic_class, attempt)
        finally:
            permit.leave()

    def _call_once(
        self, arguments: dict[str, Any], traffic_class: str, attempt: int = 1
    ) -> Coroutine[Any, Any, CallOutcome]:
        """Return the coroutine of one call, under the function's limit if one is configured."""
        self.limits.bind()
        scope = CallScope(self.limits, traffic_class, asyncio.get_running_loop(), attempt=attempt)
        # Without a limit, return `_run` itself: no extra coroutine for each call in flight.
        if self.limits.spent is None and self._limit not in self.limits.max_waits:
            return self._run(arguments, scope)
        return self._call_with_permit(arguments, scope)

    async def _call_with_permit(self, arguments: dict[str, Any], scope: CallScope) -> CallOutcome:
        if self.limits.spent is not None:
            return CallOutcome.without_call(BudgetSpentError(f"was not called: {self.limits.spent}"))
        asked = time.monotonic()
        try:
            scope.permit = await self.limits.enter(self._limit, 0, scope.traffic_class)
        except LimitError as error:
            return CallOutcome.without_call(LimitError(f"was not called: {error}"), time.monotonic() - asked)
        queued = time.monotonic() - asked
        outcome: CallOutcome | None = None
        try:
            outcome = await self._run(arguments, scope)
        finally:
            if outcome is None:
                scope.leave(None, ended=False)
            else:
                scope.leave(outcome.exception, ended=outcome.error is None)
        outcome.waited += queued
        return outcome

    async def _run(self, arguments: dict[str, Any], scope: CallScope) -> CallOutcome:
        """Run the function once. Its exceptions, a passed deadline and a crash are returned as data."""
        asked, started = time.monotonic(), None
        outer = current_scope.get()  # not the token of `set`, which is an object for the garbage collector
        current_scope.set(scope)
        abandoned = True
        try:
            if self._target.is_async:
                # Not `LoopCalls.run`, which would add a coroutine to each call in flight.
                call = self._loop_calls.start(self._target.call, arguments, self.timeout, scope.waited)
                try:
                    outcome: CallOutcome = await call.future
                finally:
                    self._loop_calls.leave(call)
            else:
                invocation = Invocation(self._target.call, (), arguments)
                try:
                    outcome = await self._run_sync(invocation, scope)
                finally:
                    started = invocation.started
            abandoned = False
        except TimeoutError as error:
            assert self.timeout is not None
            late = RewardTimeoutError(f"ran past its deadline of {self.timeout:g} s{error}")
            outcome = CallOutcome(None, None, self.timeout, late)
        except RewardCrashedError as error:
            outcome = CallOutcome(None, None, 0.0 if started is None else time.monotonic() - started, error)
        except (OSError, RuntimeError) as error:
            # Not raised by the function, whose exceptions are data: the system is out of file descriptors, processes
            # or threads.
            outcome = CallOutcome.without_call(
                RewardCrashedError(f"could not be started: {type(error).__name__}: {error}")
            )
        finally:
            if current_scope.get() is scope:  # if not, the garbage collector closes this coroutine in another context
                current_scope.set(outer)
            scope.end(abandoned)
        if started is not None:
            outcome.queued = max(0.0, started - asked)
        waited = scope.waited(time.monotonic())
        if waited:
            outcome.waited = waited
            if not isinstance(outcome.error, RewardTimeoutError):  # its `seconds` are already the deadline
                outcome.seconds = max(0.0, outcome.seconds - waited)
        if (active := scope.sample) is not None and active.is_recorded:
            problem = outcome.exception or outcome.error
            active.called(self._target.name, outcome.seconds, outcome.queued, outcome.waited, problem)
        return outcome

    async def _run_sync(self, invocation: Invocation, scope: CallScope) -> CallOutcome:
        """Run a sync function in a thread or a process. If it returns an awaitable, await it on the event loop."""
        if (active := current()) is not None:
            active.queue("a free process" if self.in_processes else "a free thread", invocation)
        if isinstance(self._executor, DaemonThreads):
            outcome = await self._executor.run(invocation, self.timeout, scope.waited)
        else:
            async with self._processes.serve(scope) as context:
                outcome = await self._executor.run(invocation, self.timeout, scope.waited, context)
        if outcome.exception is None and inspect.isawaitable(outcome.value):
            seconds = outcome.seconds
            left = None if self.timeout is None else max(0.0, self.timeout - seconds)
            outcome = await self._loop_calls.run(outcome.value, left, scope.waited)
            outcome.seconds += seconds
        return outcome
