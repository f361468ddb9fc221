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
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.config import parse
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    InvalidScoreError,
    LimitError,
    RewardCrashedError,
    RewardFunctionError,
    RewardTimeoutError,
    ScoringError,
)
from reward_loop.limits.call import Call, current_call
from reward_loop.limits.local import DEFAULT, REWARD_MODEL, Limits, LocalLimits, Order, answer_of
from reward_loop.limits.outages import JudgeAddress
from reward_loop.processes.child import callable_of
from reward_loop.processes.outcome import CallOutcome, describe_exception, outcome_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.scoring.isolation import ScoringOptions, in_processes, is_isolated
from reward_loop.scoring.results import failed_after, normalise, not_called, to_result
from reward_loop.scoring.retry import Retry
from reward_loop.scoring.signature import Target, resolve
from reward_loop.scoring.threads import DaemonThreads
from reward_loop.types import RewardResult, RewardSample

_NAMED = 8
"""The maximum number of sample uids that an error message lists."""


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

    def __init__(
        self,
        function: Any,
        *,
        reward_kwargs: Mapping[str, Any] | None = None,
        options: ScoringOptions | None = None,
        limit: str = DEFAULT,
        limits: Limits | None = None,
        **own: Any,
    ) -> None:
        """Inspect the function's signature.

        Args:
            function: a function, a callable object, or a class or instance with ``compute_score``; or a `Target`
                returned by `resolve`.
            reward_kwargs: configured arguments of the function, or of its class.
            options: all options, such as a `RewardLoopConfig`.
            limit: the name of the limit that each call acquires; ignored if no such limit is configured.
            limits: limits and budget shared with other functions; the caller closes them. By default the function
                creates its own from ``options``, and closes them.
            own: single options instead of ``options``: ``timeout``, ``max_threads``, ``isolation``, ``max_processes``,
                ``max_memory_mb``, and the others of `RewardLoopConfig` about calls.

        Raises:
            FunctionLoadError: the function requires an argument that the reward loop does not provide, or cannot run
                in a process.
            ConfigError: ``limit`` is reserved, or two arguments exclude each other.
        """
        if limit == REWARD_MODEL:
            raise ConfigError(
                f"the limit {limit!r} is reserved for functions that get the address of a served reward model: name "
                "another limit"
            )
        if options is None:
            options = parse(ScoringOptions, own, type(self).__name__)
        elif own:
            name, value = next(iter(own.items()))
            raise ConfigError(
                f"{type(self).__name__}: {name}={value!r} and options={type(options).__name__}(...) are both given: "
                f"set {name} in the options"
            )
        if reward_kwargs and isinstance(function, Target):
            raise ConfigError(f"reward_kwargs have no effect: the signature of {function.name} has been read already")
        self._target = function if isinstance(function, Target) else resolve(function, reward_kwargs)
        self.name = self._target.name
        self.is_async = self._target.is_async
        self.requires = self._target.requires
        self.takes = self._target.passes
        self._threads = DaemonThreads(options.max_threads)
        self._executor: DaemonThreads | WorkerProcesses = self._threads
        self._object: Any = None
        """The function, or the object whose method is called; ``None`` until it is needed in this process."""
        if is_isolated(self._target) or (options.isolation == "process" and not self._target.is_async):
            self._executor = processes = in_processes(self._target, options)
            # Its constructor does not run in this process: if it raises, every sample would fail.
            if inspect.isclass(self._target.origin):
                processes.load()
        else:
            self._function = callable_of(self._made())
        self._retry = Retry(options.retry)
        self._limits_of_call = [limit]
        """The limits that each call acquires, if they are configured. The place at the reward model comes last: a call
        that waits for another limit must not hold it."""
        if "reward_router_address" in self._target.passes:
            self._limits_of_call.append(REWARD_MODEL)
        self._owns_limits = limits is None
        self.limits = LocalLimits(options) if limits is None else limits
        self.timeout = options.timeout

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        return isinstance(self._executor, WorkerProcesses)

    def _checked(self, sample: RewardSample) -> RewardSample:
        """Return the sample, with an error if it lacks an argument that the function requires."""
        if sample.error is None and (problem := self._target.problem(sample)) is not None:
            return replace(sample, error=problem)
        return sample

    def _made(self) -> Any:
        """Return the function, or the object, which is made once."""
        if self._object is None:
            self._object = self._target.make()
        return self._object

    def __repr__(self) -> str:
        where = "async" if self.is_async else "sync"
        if isinstance(self._executor, WorkerProcesses):
            where += f", max_processes={self._executor.max_processes}, max_memory_mb={self._executor.max_memory_mb}"
        return f"{type(self).__name__}({self.name}, {where}, timeout={self.timeout})"

    def close(self) -> None:
        """Stop the idle worker processes, and close the limits that the function created itself.

        The process that forks them is stopped too if no call is in flight. A later call starts new ones, and reopens
        the limits.
        """
        if isinstance(self._executor, WorkerProcesses):
            self._executor.close()
        if self._owns_limits:
            self.limits.close()

    async def _call(self, make_arguments: Callable[..., dict[str, Any]], step: int | None) -> CallOutcome:
        """Call the function, and again after transient errors and outages.

        Args:
            make_arguments: receives the ``attempt``, and returns the arguments of that call, which no other one sees.
            step: the training step.
        """
        started = time.monotonic()
        # Of all attempts: a retry keeps its place in the queues of limits.
        order = (float(step or 0), time.time())
        outcome = await self._attempt(make_arguments, order)
        if outcome.exception is not None:
            again = functools.partial(self._attempt, make_arguments, order)
            outages = self.limits.outages if self.limits.outages.timeout_s else None
            outcome = await self._retry.again(outcome, again, started, outages, self.name)
        elif self.limits.outages.open and outcome.error is None:
            self.limits.outages.answered(JudgeAddress("", function=self.name))
        return outcome

    async def _attempt(
        self, make_arguments: Callable[..., dict[str, Any]], order: Order, attempt: int = 1
    ) -> CallOutcome:
        """Call the function once, under its limits if they are configured."""
        try:
            arguments = make_arguments(attempt=attempt)
        except RecursionError:
            why = "was not called: its data is nested too deeply, or contains itself"
            return CallOutcome.without_call(ScoringError(why, cause="invalid row"))
        if self.limits.spent is not None:
            return CallOutcome.without_call(BudgetSpentError(_not_called(self.limits.spent, attempt)))
        call = Call(self.limits, self.timeout, order, attempt)
        if self.limits.max_waits:
            try:
                await call.enter(self._limits_of_call)
            except (LimitError, BudgetSpentError) as error:
                call.end(abandoned=True)
                return CallOutcome.without_call(type(error)(_not_called(str(error), attempt)), call.waited)
            except BaseException:
                call.end(abandoned=True)
                raise
        permitted = time.monotonic()
        outer = current_call.get()  # not the token of `set`, which is an object for the garbage collector
        current_call.set(call)
        outcome: CallOutcome | None = None
        # Until the function has ended: after its deadline or a cancellation, its thread may run on.
        abandoned = True
        try:
            if not self.is_async:
                outcome = await self._call_sync(call, arguments)
            else:
                # In this coroutine: another one would be one more object for each call in flight.
                task = call.loop.create_task(_run_on_loop(call, self._function, arguments))
                call.watch()
                try:
                    outcome = await call.future
                finally:
                    _cancel(task)
            abandoned = False
        # `TimeoutError` is an OSError; `Thread.start` raises RuntimeError if there are no more threads.
        except (RewardCrashedError, OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            if current_call.get() is call:  # if not, the garbage collector closes this coroutine in another context
                current_call.set(outer)
            # Without the end of the function, it is unknown whether the service answered.
            answer = answer_of(outcome.exception) if outcome is not None and outcome.error is None else ()
            call.end(abandoned, *answer)
        if call.budget_error is not None and outcome.exception is not None:  # it may be another one, raised from this
            outcome.exception, outcome.error = None, BudgetSpentError(f"got no permit: {call.budget_error}")
        outcome.wait_s = call.waited
        inside = outcome.wait_s and call.waited_inside
        if call.started is not None and not self.is_async:
            outcome.queue_s = max(0.0, call.started - permitted)
        if inside and not isinstance(outcome.error, RewardTimeoutError):  # its `seconds` are the deadline
            outcome.work_s = max(0.0, outcome.work_s - inside)
        if (active := call.sample) is not None and active.is_recorded:
            problem = outcome.exception or outcome.error
            active.called(self.name, outcome.work_s, outcome.queue_s, inside, problem)
        return outcome

    async def _call_sync(self, call: Call, arguments: dict[str, Any]) -> CallOutcome:
        """Call a sync function in a thread or a process. If it returns an awaitable, await it on the event loop."""
        if call.sample is not None:
            call.sample.queue("a free process" if self.in_processes else "a free thread", call)
        if isinstance(self._executor, DaemonThreads):
            return await self._call_in_thread(call, self._function, arguments)
        uid = None if call.sample is None else call.sample.sample.uid
        key = f"{uid} {call.attempt} {arguments.get('solution_str')}"
        return await self._executor.run(arguments, key=key, timeout=self.timeout, begin=call.begin)

    async def _call_in_thread(
        self, call: Call, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> CallOutcome:
        call.watch()
        outcome = await self._threads.run(functools.partial(_begin, call, function, arguments), call.future)
        if outcome.exception is None and inspect.isawaitable(outcome.value):
            seconds, awaitable = outcome.work_s, outcome.value
            call.future = call.loop.create_future()
            call.watch()  # until the deadline that it has had from its start
            task = call.loop.create_task(_run_on_loop(call, lambda: awaitable, {}))
            try:
                outcome = await call.future
            finally:
                _cancel(task)
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


def _begin(call: Call, function: Callable[..., Any], arguments: Mapping[str, Any]) -> CallOutcome:
    call.begin()
    return outcome_of(function, arguments)


async def _run_on_loop(call: Call, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> None:
    """Await the function, and set its `CallOutcome` on ``call.future``, unless the caller has abandoned the call.

    It runs in its own task, so that a sample also ends at its deadline if the function swallows the cancellation, such
    as by a bare ``except:`` around a retry. `asyncio.wait` would do the same, but a sample would take a third more time
    and memory. Exceptions become part of the outcome, except KeyboardInterrupt and GeneratorExit.
    """
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
    invalid return value become *failed* results. Cancellation, Ctrl-C and the errors listed at `__call__` propagate.

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
        """Score one sample.

        Raises:
        """
        if (sample := self._checked(sample)).error is not None:
            return not_called(sample)
        arguments = functools.partial(self._target.arguments, sample, reward_router_address, reward_model_tokenizer)
        return to_result(await self._call(arguments, sample.global_steps), sample, self.name)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Return the scores after the class's ``post_process_scores``, or unchanged if the class has none.

        It has the deadline of a call, but no permits: `reward_loop.limit` has no effect in it.

        Raises:
            ScoringError: the method raised, ran past the deadline, or did not return one finite number per score.
        """
        if not self._target.has_post_process:
            return scores
        method = f"post_process_scores beside {self.name}"
        call = Call(self.limits, self.timeout)
        process = functools.partial(_process, self._made().post_process_scores, scores)
        try:
            outcome = await self._call_in_thread(call, process, {})
        except (OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            call.end(abandoned=False)
        if outcome.error is not None:
            raise outcome.error.about(function=method)
        if outcome.exception is not None:
            problem = f"raised {describe_exception(outcome.exception)}"
            raise RewardFunctionError(problem, function=method) from outcome.exception
        # In these, numbers belong to no position: they would become the scores of other samples.
        if isinstance(outcome.value, Mapping | Set):
            problem = f"must return a list of numbers: it returned a {type(outcome.value).__name__}"
            raise InvalidScoreError(problem, function=method)
        try:
            processed = [normalise(score)[0] for score in outcome.value]
        except (InvalidScoreError, TypeError) as error:
            raise InvalidScoreError(f"must return a list of numbers: {error}", function=method) from error
        numbers = [score for score in processed if score is not None]
        if not len(numbers) == len(processed) == len(scores):
            missing = len(processed) - len(numbers)
            what = f"{len(processed)} values, {missing} of them None" if missing else f"{len(numbers)} numbers"
            raise InvalidScoreError(f"received {len(scores)} scores and returned {what}", function=method)
        return numbers


def _process(post_process_scores: Callable[[list[float]], Any], scores: list[float]) -> Any:
    """Return what the method returns; the numbers of a generator as a list, with at most one number too many."""
    returned = post_process_scores(list(scores))
    # Here, the code of a generator runs in the thread and has a deadline; its exceptions are data.
    # One more than expected shows a wrong number, also of a generator that never ends.
    return list(itertools.islice(returned, len(scores) + 1)) if isinstance(returned, Iterator) else returned


class ListScoringFunction(UserFunction):
    """A batched reward function: it takes ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos``.

    ``await function(samples)`` returns one `RewardResult` per sample, in order. The user's function returns a list of
    the same length. Each item is a value that a `ScoringFunction` accepts, or an exception (as from
    `asyncio.gather` with ``return_exceptions=True``). A call has one deadline and one thread. If the call fails, all
    its samples fail.
    """

    def __init__(self, function: Any, *, reward_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Inspect the function's signature.

        Args:
            function: as in `ScoringFunction`, but with list arguments.
            reward_kwargs: configured arguments of the function, or of its class.
            options: the keyword options of `ScoringFunction`.

        Raises:
            FunctionLoadError: the function requires an argument that the reward loop does not provide.
        """
        super().__init__(resolve(function, reward_kwargs, of_lists=True), **options)

    async def __call__(
        self,
        samples: Sequence[RewardSample],
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> list[RewardResult]:
        """Score the samples in one call. Invalid samples (``sample.error`` is set) fail and are not passed to it."""
        samples = [self._checked(sample) for sample in samples]
        valid = [sample for sample in samples if sample.error is None]
        context = {"router_address": reward_router_address, "tokenizer": reward_model_tokenizer}
        results = iter(await self._score(valid, context) if valid else [])
        return [next(results) if sample.error is None else not_called(sample) for sample in samples]

    async def _score(self, samples: list[RewardSample], context: Mapping[str, Any]) -> list[RewardResult]:
        arguments = functools.partial(self._target.list_arguments, samples, **context)
        outcome = await self._call(arguments, samples[0].global_steps)
        if outcome.exception is not None or outcome.error is not None:
            return [to_result(outcome, _together(samples), self.name)] * len(samples)
        try:
            values = _items(outcome.value, len(samples))
        except InvalidScoreError as error:
            called = to_result(outcome, samples[0], self.name)
            return [failed_after(called, error.about(sample, self.name)) for sample in samples]
        return [
            to_result(_outcome_of(value, outcome), sample, self.name)
            for sample, value in zip(samples, values, strict=True)
        ]


def _together(samples: Sequence[RewardSample]) -> RewardSample:
    """Return a sample that names all samples of a call in messages."""
    names = [str(sample.uid) for sample in samples[:_NAMED]]
    if len(samples) > _NAMED:
        names.append(f"{len(samples) - _NAMED} more")
    return RewardSample("", uid=", ".join(names))


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


def _outcome_of(item: Any, call: CallOutcome) -> CallOutcome:
    """Return the outcome of one sample of a call."""
    return replace(call, value=None, exception=item) if isinstance(item, BaseException) else replace(call, value=item)
