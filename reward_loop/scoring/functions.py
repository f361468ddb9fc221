"""Reward functions of one sample and of batches, called with a deadline, retries and limits.

Every sample gets exactly one result, also when the function fails: what goes wrong in a call is data, in a
`CallOutcome`.

    _call           failed? `Retry.again` makes further attempts, and waits for the end of outages
      _attempt      limited? It acquires the function's limits first. Where? On the event loop (`_run_on_loop`), or by
                    `_call_sync` in a thread or a process

A call in flight has one coroutine each of `_call` and `_attempt`, and no more: with 20,000 samples in flight, the
garbage collector takes about 1.5 us per sample for each of its objects.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from reward_loop._util.daemon_threads import DaemonThreads
from reward_loop._util.text import cut, shorten
from reward_loop.config import parse
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    FunctionLoadError,
    InvalidScoreError,
    LimitError,
    RewardCrashedError,
    RewardFunctionError,
    RewardTimeoutError,
    ScoringError,
)
from reward_loop.limits.call import Call, Deadlines, current_call
from reward_loop.limits.local import DEFAULT, REWARD_MODEL, Limits, LocalLimits, Order, answer_of
from reward_loop.limits.outages import JudgeAddress
from reward_loop.processes.child import callable_of
from reward_loop.processes.outcome import CallOutcome, describe_exception, outcome_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.scoring.load import file_modules
from reward_loop.scoring.options import ScoringOptions
from reward_loop.scoring.results import failed_after, normalise, not_called, to_result
from reward_loop.scoring.retry import Retry
from reward_loop.scoring.signature import Target, resolve
from reward_loop.types import RewardResult, RewardSample

_NAMES = 120
"""The largest number of characters of the names of samples in an error message."""


class UserFunction:
    """The user's function with its deadline, retries and limits, whether it scores one sample in a call or several."""

    name: str
    """The function's name and file, for messages."""
    is_async: bool
    """Whether the function is awaited on the event loop."""
    requires: frozenset[str]
    """The fields of a sample that the function's signature declares without a default."""
    takes: frozenset[str]
    """The arguments that the function receives, by their names for one sample, if the sample has them."""

    of_lists: ClassVar[bool] = False
    """Whether the function is called with lists for several samples."""

    def __init__(
        self,
        function: Any,
        *,
        reward_kwargs: Mapping[str, Any] | None = None,
        options: ScoringOptions | None = None,
        limits: Limits | None = None,
        **own: Any,
    ) -> None:
        """Inspect the function's signature.

        Args:
            function: a function, a callable object, or a class or instance with ``compute_score``.
            reward_kwargs: configured arguments of the function, or of its class.
            options: all options, such as a `RewardLoopConfig`.
            limits: limits and budget shared with other functions; the caller closes them. By default the function
                creates its own from ``options``, and closes them.
            own: single options instead of ``options``: ``timeout``, ``max_threads``, ``isolation``, ``max_processes``,
                ``max_memory_mb``, and the others of `RewardLoopConfig` about calls.

        Raises:
            FunctionLoadError: the function requires an argument that the reward loop does not provide, or cannot run
                in a process.
            ConfigError: an option is invalid, or is given beside ``options``.
        """
        if options is None:
            options = parse(ScoringOptions, own, type(self).__name__)
        elif own:
            name, value = next(iter(own.items()))
            raise ConfigError(f"{type(self).__name__}: {name}={value!r} has no effect beside options: set it in them")
        self._target = resolve(function, reward_kwargs, of_lists=self.of_lists)
        self.name = self._target.name
        self.is_async = self._target.is_async
        self.requires = self._target.requires
        self.takes = self._target.passes
        self._threads = DaemonThreads(options.max_threads)
        self._processes: WorkerProcesses | None = None
        if self._target.is_isolated or (options.isolation == "process" and not self.is_async):
            self._processes = _processes_of(self._target, options)
        else:
            self._function = callable_of(self._object)
        self._retry = Retry(options.retry)
        self._limits_of_call = [DEFAULT]
        """The limits that each call acquires, if they are configured. The place at the reward model comes last: a call
        that waits for another limit must not hold it."""
        if "reward_router_address" in self._target.passes:
            self._limits_of_call.append(REWARD_MODEL)
        self._owns_limits = limits is None
        self.limits = LocalLimits(options) if limits is None else limits
        self.timeout = options.timeout
        self._deadlines = Deadlines(options.timeout)

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        return self._processes is not None

    @functools.cached_property
    def _object(self) -> Any:
        """The function, or the object whose method is called, which is made when this process needs it."""
        return self._target.make()

    def __repr__(self) -> str:
        where = "async" if self.is_async else "sync"
        if self._processes is not None:
            where = f"max_processes={self._processes.max_processes}"
        return f"{type(self).__name__}({self.name}, {where}, timeout={self.timeout})"

    def close(self) -> None:
        """Stop the worker processes, and close the limits that the function created itself.

        Calls in flight fail. A later call starts new processes, and reopens the limits.
        """
        if self._processes is not None:
            self._processes.close()
        if self._owns_limits:
            self.limits.close()

    async def _call(self, samples: Sequence[RewardSample], router_address: str | None, tokenizer: Any) -> CallOutcome:
        """Call the function for a sample, or for those of a list, and again after transient errors and outages."""
        started = time.monotonic()
        context = {"reward_router_address": router_address, "reward_model_tokenizer": tokenizer}
        # Of all attempts: a retry keeps its place in the queues of limits.
        order = (float(samples[0].global_steps or 0), time.time())
        outcome = await self._attempt(samples, context, order, 1)
        if outcome.exception is not None:
            again = functools.partial(self._attempt, samples, context, order)
            outages = self.limits.outages if self.limits.outages.timeout_s else None
            outcome = await self._retry.again(outcome, again, started, outages, self.name)
        elif self.limits.outages.open and outcome.error is None:
            self.limits.outages.answered(JudgeAddress("", function=self.name))
        return outcome

    async def _attempt(
        self, samples: Sequence[RewardSample], context: Mapping[str, Any], order: Order, attempt: int
    ) -> CallOutcome:
        """Call the function once, under its limits if they are configured."""
        try:
            arguments = self._target.arguments(samples, context, attempt)
        except RecursionError:
            why = "was not called: its data is nested too deeply, or contains itself"
            return CallOutcome.without_call(ScoringError(why, cause="invalid row"))
        if self.limits.spent is not None:
            return CallOutcome.without_call(BudgetSpentError(_not_called(self.limits.spent, attempt)))
        call = Call(self.limits, self.timeout, order, attempt)
        outcome: CallOutcome | None = None
        # Until the function has ended: after its deadline or a cancellation, its thread may run on.
        abandoned = True
        try:
            if self.limits.max_waits:
                await call.enter(self._limits_of_call)
            permitted = time.monotonic()
            if not self.is_async:
                outcome = await self._call_sync(call, arguments)
            else:
                # In this coroutine: another one would be one more object for each call in flight.
                task = call.loop.create_task(_run_on_loop(call, self._function, arguments))
                self._deadlines.add(call)
                try:
                    outcome = await call.future
                except BaseException:
                    _cancel(task)
                    raise
            abandoned = False
        except (LimitError, BudgetSpentError) as error:
            outcome = CallOutcome.without_call(type(error)(_not_called(str(error), attempt)))
        # `TimeoutError` is an OSError; `Thread.start` raises RuntimeError if there are no more threads.
        except (RewardCrashedError, OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            # Without the end of the function, it is unknown whether the service answered.
            answer = answer_of(outcome.exception) if outcome is not None and outcome.error is None else ()
            self._deadlines.discard(call)
            call.end(abandoned, *answer)
        if call.budget_error is not None and outcome.exception is not None:  # it may be another one, raised from this
            outcome.exception, outcome.error = None, BudgetSpentError(f"got no permit: {call.budget_error}")
        outcome.wait_s = call.waited
        inside = outcome.wait_s and call.waited_inside
        if not self.is_async and call.started is not None:
            outcome.queue_s = max(0.0, call.started - permitted)
        if inside and not isinstance(outcome.error, RewardTimeoutError):  # its `seconds` are the deadline
            outcome.work_s = max(0.0, outcome.work_s - inside)
        if outcome.attempts and (active := call.sample) is not None and active.is_recorded:
            problem = outcome.exception or outcome.error
            active.called(self.name, outcome.work_s, outcome.queue_s, inside, problem)
        return outcome

    async def _call_sync(self, call: Call, arguments: dict[str, Any]) -> CallOutcome:
        """Call a sync function in a thread or a process. If it returns an awaitable, await it on the event loop."""
        if call.sample is not None:
            call.sample.queue("a free process" if self.in_processes else "a free thread", call)
        if self._processes is None:
            return await self._call_in_thread(call, functools.partial(self._function, **arguments))
        uid = None if call.sample is None else call.sample.sample.uid
        key = f"{uid} {call.attempt} {arguments.get('solution_str')}"
        return await self._processes.run(arguments, key=key, timeout=self.timeout, begin=call.begin)

    async def _call_in_thread(self, call: Call, function: Callable[[], Any]) -> CallOutcome:
        def run() -> CallOutcome:
            current_call.set(call)
            call.begin()
            return outcome_of(function, {})

        self._deadlines.add(call)
        outcome = await self._threads.run(run, call.future)
        if outcome.exception is None and inspect.isawaitable(outcome.value):
            seconds, awaitable = outcome.work_s, outcome.value
            call.future = call.loop.create_future()
            call.watch()  # until the deadline that it has had from its start
            task = call.loop.create_task(_run_on_loop(call, lambda: awaitable, {}))
            try:
                outcome = await call.future
            except BaseException:
                _cancel(task)
                raise
            outcome.work_s += seconds
        return outcome

    def _without_end(self, error: Exception, call: Call) -> CallOutcome:
        """Return the outcome of a call that was stopped, crashed or did not start. ``error`` is not the function's."""
        if isinstance(error, TimeoutError):
            assert self.timeout is not None
            late = RewardTimeoutError(f"ran past its deadline of {self.timeout:g} s{error}")
            return CallOutcome(None, None, self.timeout, late)
        if isinstance(error, RewardCrashedError):
            seconds = 0.0 if call.started is None else time.monotonic() - call.started
            return CallOutcome(None, None, seconds, error)
        # The system is out of file descriptors, processes or threads.
        problem = f"could not be started: {type(error).__name__}: {error}"
        return CallOutcome.without_call(RewardCrashedError(problem))


def _not_called(why: str, attempt: int) -> str:
    return f"was not called{' again' if attempt > 1 else ''}: {why}"


def _processes_of(target: Target, options: ScoringOptions) -> WorkerProcesses:
    """Return the processes in which a function runs, with the object of a class.

    Raises:
        FunctionLoadError: the function is async, or cannot be sent to a process, or its object cannot be made.
    """
    if target.is_async or getattr(target.origin, "has_async_parts", False):
        what = "is async" if target.is_async else "has async parts"
        raise FunctionLoadError(
            f"{target.name} {what}, and only sync functions run in processes: write a plain `def`, or leave out "
            "`isolated` and isolation=process"
        )
    processes = WorkerProcesses(
        target.origin,
        target.constructor,
        name=target.name,
        files=file_modules(),
        max_processes=options.max_processes,
        max_memory_mb=options.max_memory_mb,
        calls_per_process=options.calls_per_process,
    )
    # Its constructor does not run in this process: if it raises, every sample would fail.
    if inspect.isclass(target.origin):
        processes.load()
    return processes


async def _run_on_loop(call: Call, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> None:
    """Await the function, and set its `CallOutcome` on ``call.future``, unless the caller has abandoned the call.

    It runs in its own task, so that a sample also ends at its deadline if the function swallows the cancellation, such
    as by a bare ``except:`` around a retry. `asyncio.wait` would do the same, but a sample would take a third more time
    and memory. Exceptions become part of the outcome, except KeyboardInterrupt and GeneratorExit.
    """
    current_call.set(call)
    # Here, and not where the task is created: a stall of the loop in between must not count.
    call.begin()
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
        call.future.set_result(CallOutcome(value, exception, time.perf_counter() - started))


_cancelled: set[asyncio.Task[None]] = set()
"""The cancelled tasks of functions that have not ended yet; the event loop has only weak references to tasks."""


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel the task of a function if it still runs, and keep it until it has ended."""
    if not task.done():
        _cancelled.add(task)
        task.add_done_callback(_cancelled.discard)
        task.cancel()
    elif not task.cancelled():
        task.exception()  # marks a KeyboardInterrupt as retrieved, which also ended the event loop


class ScoringFunction(UserFunction):
    """Calls the user's reward function for single samples, with a deadline, retries and limits.

    ``await function(sample)`` returns a `RewardResult`. An exception in the user's code, a passed deadline and an
    invalid return value become *failed* results. Cancellation and Ctrl-C propagate.

    Async functions are awaited on the event loop. Sync functions run in daemon threads, or in worker processes; if a
    sync function returns an awaitable, it is awaited on the event loop.

    Example::

        function = ScoringFunction(compute_score, timeout=60)
        result = await function(RewardSample("2+2=4", ground_truth="4"))
    """

    @property
    def has_post_process(self) -> bool:
        """Whether the user's class has ``post_process_scores``."""
        return self._target.has_post_process

    async def __call__(
        self,
        sample: RewardSample,
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> RewardResult:
        """Score one sample."""
        if (problem := self._target.problem(sample)) is not None:
            return not_called(sample, problem)
        outcome = await self._call((sample,), reward_router_address, reward_model_tokenizer)
        return to_result(outcome, sample, self.name)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Return the scores after the class's ``post_process_scores``.

        It has the deadline of a call, and can ask judges under limits and the budget.

        Raises:
            ScoringError: the method raised, ran past the deadline, or did not return one finite number per score.
        """
        method = f"post_process_scores beside {self.name}"
        call = Call(self.limits, self.timeout)
        try:
            outcome = await self._call_in_thread(call, functools.partial(self._object.post_process_scores, [*scores]))
        except (OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            self._deadlines.discard(call)
            call.end(abandoned=True)  # after the deadline or a cancellation, its thread may run on
        if outcome.error is not None:
            raise outcome.error.about(function=method)
        if outcome.exception is not None:
            problem = f"raised {describe_exception(outcome.exception)}"
            raise RewardFunctionError(problem, function=method) from outcome.exception
        try:
            processed = [normalise(score)[0] for score in _items(outcome.value, len(scores))]
        except InvalidScoreError as error:
            raise error.about(function=method) from error
        numbers = [score for score in processed if score is not None]
        if len(numbers) < len(scores):
            raise InvalidScoreError(f"returned None {len(scores) - len(numbers)} times", function=method)
        return numbers


class ListScoringFunction(UserFunction):
    """A batched reward function: it takes ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos``.

    ``await function(samples)`` returns one `RewardResult` per sample, in order. The user's function returns a list of
    the same length. Each item is a value that a `ScoringFunction` accepts, or an exception (as from
    `asyncio.gather` with ``return_exceptions=True``). A call has one deadline and one thread. If the call fails, all
    its samples fail.
    """

    of_lists = True

    async def __call__(
        self,
        samples: Sequence[RewardSample],
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> list[RewardResult]:
        """Score the samples in one call. Invalid samples (``sample.error`` is set) fail and are not passed to it."""
        problems = [self._target.problem(sample) for sample in samples]
        valid = [sample for sample, problem in zip(samples, problems, strict=True) if problem is None]
        results = iter(await self._score(valid, reward_router_address, reward_model_tokenizer) if valid else [])
        return [
            next(results) if problem is None else not_called(sample, problem)
            for sample, problem in zip(samples, problems, strict=True)
        ]

    async def _score(
        self, samples: list[RewardSample], router_address: str | None, tokenizer: Any
    ) -> list[RewardResult]:
        outcome = await self._call(samples, router_address, tokenizer)
        if outcome.exception is not None or outcome.error is not None:
            names = RewardSample("", uid=cut(", ".join(str(sample.uid) for sample in samples), _NAMES))
            return [to_result(outcome, names, self.name)] * len(samples)
        try:
            values = _items(outcome.value, len(samples))
        except InvalidScoreError as error:
            called = to_result(outcome, samples[0], self.name)
            return [failed_after(called, error.about(sample, self.name)) for sample in samples]
        results = []
        for sample, value in zip(samples, values, strict=True):
            exception = value if isinstance(value, BaseException) else None
            one = replace(outcome, value=value, exception=exception)
            results.append(to_result(one, sample, self.name))
        return results


def _items(returned: Any, count: int) -> Sequence[Any]:
    """Return the items that a function returned for ``count`` samples; arrays and tensors as lists.

    Raises:
        InvalidScoreError: it returned something else.
    """
    try:
        items = returned.tolist() if hasattr(returned, "tolist") else returned
    except Exception as error:  # for instance a tensor on a failed device
        kind = type(returned).__name__
        raise InvalidScoreError(f"returned a {kind} that cannot be read: {shorten(error)}") from error
    if not isinstance(items, Sequence) or isinstance(items, str | bytes) or len(items) != count:
        raise InvalidScoreError(f"must return a list of {count} scores, one for each sample; got {shorten(items)}")
    return items
