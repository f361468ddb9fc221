"""Calls a reward function on a few samples, as a run would call it, and reports problems that would occur in a run."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import cloudpickle

from reward_loop._util.text import cut, duration, listing
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.managers import CompositeRewardLoopManager, NaiveRewardLoopManager, scoring_function
from reward_loop.managers import get as get_manager
from reward_loop.scoring import ListScoringFunction, ScoringFunction
from reward_loop.scoring.batched import CONTEXT, FIELDS
from reward_loop.scoring.signature import PROVIDED, resolve
from reward_loop.types import RewardSample

__all__ = ["Callee", "Finding", "Report", "Row", "check"]

Status = Literal["ok", "note", "problem", "skipped"]

MAX_LAG_S = 0.1
"""Maximum time in seconds for which an async function may block the event loop, and with it all other samples."""

_TICK_S = 0.01
_ERROR_CHARACTERS = 2000
"""Maximum number of characters of an error that are shown."""
_HUGE_CHARACTERS = 1_000_000
_HUGE_TIMEOUT_S = 30.0
_MALFORMED = '\x00\ufffd \\boxed{1 {{ ((( ``` <think> {"a": [1, "\u202e\U0001f600 #### $$ %s %d \\x \n\r\n\t'
_ONE_BY_ONE = "not tried with a composite: check the function of each component by itself"
_ADVICE = {
    "only works in main thread": "it uses signals, which threads cannot: mark it with @reward_loop.isolated",
    "event loop is already running": "it runs an event loop of its own: make it `async def` and use await",
    "cannot be called from a running event loop": "it runs an event loop of its own: make it `async def` and use await",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one sample."""

    uid: str
    outcome: str
    score: float | None
    seconds: float
    """Run time of the function, in seconds."""
    components: Mapping[str, Any]
    error: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    text: str
    """What was observed and, for a problem, what to change."""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that the check calls."""

    name: str
    """Name and file of the function. For a composite, the name of the component precedes them."""
    is_async: bool
    in_processes: bool


@dataclass(slots=True)
class Report:
    """The report on a function, or on all functions of a composite."""

    functions: list[Callee]
    """The function, or the functions of the components of a composite."""
    of_lists: bool = False
    """Whether the function takes lists of samples. Such a function is called with all samples at once."""
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """The findings that should be fixed before a run."""
        return [finding for finding in self.findings if finding.status == "problem"]


async def check(
    function: Any | None,
    samples: Sequence[RewardSample],
    *,
    reward_kwargs: Mapping[str, Any] | None = None,
    manager: str = "naive",
    router_address: str | None = None,
    options: RewardLoopConfig | None = None,
    concurrency: int = 16,
    max_lag_s: float = MAX_LAG_S,
    on_step: Callable[[str], None] = lambda step: None,
) -> Report:
    """Call a reward function in the ways that a run may call it, and report what goes wrong.

    The function is called about ``2 * len(samples) + concurrency + 6`` times. A function of lists is called about
    ``concurrency / len(samples) + 9`` times, each time with all samples.

    Args:
        function: the function, in any form that `ScoringFunction` takes. For managers such as `batch` and `group`, a
            function of lists. ``None`` if each component of a composite has its own.
        samples: a few samples like those of a run.
        reward_kwargs: configured arguments of the function.
        manager: the reward manager, by name or import path.
        router_address: ``host:port`` that the function receives as ``reward_router_address``.
        options: options of the run; the policies and bounds on failures are ignored here.
        concurrency: maximum number of calls in flight when concurrent calls are tested.
        max_lag_s: maximum time in seconds for which an async function may block the event loop.
        on_step: called with a description of each step before it starts.

    Returns:
        The report. It has problems if something should be changed before a run.

    Raises:
        FunctionLoadError: the function cannot be called with the arguments of the reward loop.
        ConfigError: there are no samples, a sample is broken, or the manager does not exist.
    """
    if not samples:
        raise ConfigError("there are no samples to try the function on")
    if broken := [f"{sample.uid}: {sample.error}" for sample in samples if sample.error]:
        raise ConfigError(f"{len(broken)} of {len(samples)} samples are broken. {broken[0]}")
    options = options or RewardLoopConfig()
    trial = _Trial(function, reward_kwargs, manager, router_address, options, concurrency, len(samples), max_lag_s)
    report = Report(trial.callees(), trial.of_lists)
    try:
        for step, look in (
            ("the samples, one by one", trial.samples),
            ("the samples once more", trial.again),
            ("many at a time", trial.together),
            ("odd responses", trial.odd),
            ("its arguments", trial.arguments),
            ("pickling", trial.pickling),
        ):
            on_step(step)
            report.findings += await look(samples)
            if all(row.outcome == "failed" for row in trial.first):
                break  # all other checks would fail for the same reason
    finally:
        await asyncio.to_thread(trial.close)
    report.rows = trial.first
    return report


class _Trial:
    def __init__(
        self,
        function: Any,
        reward_kwargs: Mapping[str, Any] | None,
        manager: str,
        router_address: str | None,
        options: RewardLoopConfig,
        concurrency: int,
        samples: int,
        max_lag_s: float,
    ) -> None:
        self.loaded = function
        self.reward_kwargs = reward_kwargs
        self.concurrency = concurrency
        self.max_lag_s = max_lag_s
        cls: Any = get_manager(manager)
        self.of_lists = getattr(cls, "function_type", ScoringFunction) is ListScoringFunction
        self.of_groups = getattr(cls, "needs_group", False)
        # Failures are reported and must not stop the check. A function of lists gets all samples in one call.
        batch = options.batch.model_copy(update={"max_batch_size": samples})
        update = {"max_failed_share": 1.0, "on_failed": "mask", "on_unscored": "mask", "max_threads": concurrency}
        self.options = options.model_copy(update={**update, "batch": batch})
        self.function: Any = None
        if function is not None:
            self.function = scoring_function(cls, function, self.options, reward_kwargs=reward_kwargs)
        self._new_manager = functools.partial(
            cls,
            config=self.options,
            tokenizer=None,
            reward_router_address=router_address,
            reward_model_tokenizer=None,
        )
        self._manager = self._new_manager(compute_score=self.function)
        self.is_composite = isinstance(self._manager, CompositeRewardLoopManager)
        self.functions: dict[str, Any] = self._manager.functions if self.is_composite else {"": self.function}
        """The functions by name of their component; the name is empty if the manager is not a composite."""
        self.is_async = any(one.is_async for one in self.functions.values())
        self.in_processes = any(one.in_processes for one in self.functions.values())
        self._groups = itertools.count()
        self.first: list[Row] = []
        self.same = True
        self.lags: list[float] = []

    def callees(self) -> list[Callee]:
        """Return the called functions, for the report."""
        return [
            Callee(f"{name}: {one.name}" if name else one.name, one.is_async, one.in_processes)
            for name, one in self.functions.items()
        ]

    def close(self) -> None:
        """Stop the worker processes of all functions."""
        for function in self.functions.values():
            function.close()

    async def rows(self, samples: Sequence[RewardSample], manager: Any = None) -> list[Row]:
        """Score the samples and return their results: one after another, or in one call for a function of lists."""
        if not self.of_lists:
            rows = []
            for sample in samples:
                rows.append(await self.run(sample, manager))
                if self.is_async:
                    await asyncio.sleep(_TICK_S)  # lets the lag be measured for each call separately
            return rows
        group = f"group {next(self._groups)}" if self.of_groups else None
        together = [replace(sample, group=group, group_size=len(samples)) for sample in samples]
        return list(await asyncio.gather(*(self.run(sample, manager) for sample in together)))

    async def run(self, sample: RewardSample, manager: Any = None) -> Row:
        manager = manager or self._manager
        reward = await manager.run_single(sample)
        info = dict(reward.get("reward_extra_info") or {})
        outcome = info.pop("reward_outcome", "scored")
        masked = info.pop("reward_masked", False)
        for key in ("reward_attempts", "reward_wait_seconds", "reward_queue_seconds"):
            info.pop(key, None)
        for name in self.functions if self.is_composite else ():
            for key in ("seconds", "attempts", "wait_seconds", "queue_seconds"):
                info.pop(f"{name}/{key}", None)
            if info.get(f"{name}/outcome") == "scored":
                del info[f"{name}/outcome"]
        seconds, error = info.pop("reward_seconds", 0.0), info.pop("reward_error", "")
        return Row(sample.uid or "", outcome, None if masked else reward["reward_score"], seconds, info, error)

    async def samples(self, samples: Sequence[RewardSample]) -> list[Finding]:
        async with self._watched_loop():
            self.first = await self.rows(samples)
        failed = [row for row in self.first if row.outcome == "failed"]
        unscored = sum(row.outcome == "unscored" for row in self.first)
        if failed:
            share = f"{len(failed)} of {len(self.first)} fail, and a run would leave them out"
            return [Finding("samples", "problem", f"{share}. {_explained(failed[0].error)}")]
        text = f"{len(self.first) - unscored} scored, {unscored} unscored"
        if unscored == len(self.first):
            return [Finding("samples", "problem", f"{text}: a run would have nothing to learn from")]
        scores = {row.score for row in self.first if row.score is not None}
        if len(scores) == 1 and len(self.first) > 1:
            return [Finding("samples", "note", f"{text}, all with the same score: nothing can be learned from these")]
        return [Finding("samples", "ok", text)]

    async def again(self, samples: Sequence[RewardSample]) -> list[Finding]:
        async with self._watched_loop():
            second = await self.rows(samples)
        changed = [(one, two) for one, two in zip(self.first, second, strict=True) if not _same(one, two)]
        self.same = not changed
        if changed:
            one, two = changed[0]
            text = (
                f"{len(changed)} of {len(samples)} differ when they are scored again; {one.uid}: {_shown(one)}, then "
                f"{_shown(two)}. If that is not meant, fix seeds, or the temperature of the judge"
            )
            found = [Finding("deterministic", "note", text)]
        else:
            found = [Finding("deterministic", "ok", "the same results when scored again")]
        return [*found, self._blocking()]

    def _blocking(self) -> Finding:
        if not self.is_async:
            where = "processes" if self.in_processes else "threads"
            return Finding("event loop", "ok", f"it is not async, and runs in {where}, where it may block")
        # The smaller of two measurements: a busy machine delays the loop once, a blocking function delays it each time.
        lag = min(self.lags)
        if lag <= self.max_lag_s:
            return Finding("event loop", "ok", f"no delay beyond {max(lag, 0.001) * 1000:.0f} ms")
        return Finding(
            "event loop",
            "problem",
            f"it blocks the event loop for {lag:.2f} s, and with it all other samples: await what takes time (with "
            "`await asyncio.to_thread(...)` where it is sync), or make it a plain `def`, which runs in threads",
        )

    async def together(self, samples: Sequence[RewardSample]) -> list[Finding]:
        name = "threads"
        if self.is_async or self.in_processes:
            name = "concurrent calls" if self.is_async else "processes"
        if self.of_lists:
            calls = max(2, self.concurrency // len(samples))
            copies = [*range(len(samples))] * calls
            what = f"samples of {calls} calls at a time"
            rows = [row for call in await asyncio.gather(*(self.rows(samples) for _ in range(calls))) for row in call]
        else:
            what = f"calls, {self.concurrency} at a time"
            copies = [index % len(samples) for index in range(max(self.concurrency, len(samples)))]
            slots = asyncio.Semaphore(self.concurrency)

            async def run(index: int) -> Row:
                async with slots:
                    return await self.run(samples[index])

            rows = await asyncio.gather(*(run(index) for index in copies))
        if not self.same:
            failed = sum(row.outcome == "failed" for row in rows)
            text = f"{failed} of {len(rows)} {what}, fail; results differ between calls anyway"
            return [Finding(name, "skipped", text)]
        changed = [
            (self.first[index], row)
            for index, row in zip(copies, rows, strict=True)
            if not _same(self.first[index], row)
        ]
        if not changed:
            text = f"{len(rows)} {what}, give what single ones do"
            return [Finding(name, "ok", text)]
        one, two = changed[0]
        text = (
            f"{len(changed)} of {len(rows)} {what}, give something else than alone; "
            f"{one.uid}: {_shown(one)} alone, {_shown(two)} beside others. Calls share something that changes, such as "
            "globals, attributes or caches: keep it within the call, or guard it with a lock"
        )
        return [Finding(name, "problem", text)]

    async def odd(self, samples: Sequence[RewardSample]) -> list[Finding]:
        text = samples[0].solution_str or "x"
        huge = (text * (_HUGE_CHARACTERS // len(text) + 1))[:_HUGE_CHARACTERS]
        timeouts = {name: function.timeout for name, function in self.functions.items()}
        for function in self.functions.values():
            function.timeout = min(function.timeout or _HUGE_TIMEOUT_S, _HUGE_TIMEOUT_S)
        found = []
        try:
            for name, response in {
                "an empty response": "",
                "a huge response": huge,
                "a malformed response": _MALFORMED,
            }.items():
                one = replace(samples[0], solution_str=response, uid=name)
                # A function of lists gets this response together with normal ones, which must not fail because of it.
                row, *others = await self.rows([one, *samples[1:]] if self.of_lists else [one])
                if row.outcome == "failed":
                    advice = "Policies write such: give a score, or None for no score, instead of failing"
                    if others and all(other.outcome == "failed" for other in others):
                        advice += f". The {len(others)} other samples of the call have failed with it"
                    found.append(Finding(name, "problem", f"{_explained(row.error)}\n{advice}"))
                else:
                    found.append(Finding(name, "ok", f"{_shown(row)}, in {duration(row.seconds)}"))
        finally:
            for name, function in self.functions.items():
                function.timeout = timeouts[name]
        return found

    async def arguments(self, samples: Sequence[RewardSample]) -> list[Finding]:
        if self.is_composite:
            return [Finding("arguments", "skipped", _ONE_BY_ONE)]
        provided = (*FIELDS, *CONTEXT) if self.of_lists else PROVIDED
        target = resolve(self.loaded, self.reward_kwargs, provided)
        changed: set[str] = set()

        def before(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            passed = {name: value for name, value in arguments.items() if name in target.passes}
            passed |= target.reward_kwargs
            copies = {}
            for name, value in passed.items():
                with contextlib.suppress(Exception):  # values that cannot be copied (a lock, a model) are not compared
                    copies[name] = copy.deepcopy(value)
            return passed, copies

        def compare(passed: dict[str, Any], copies: dict[str, Any]) -> None:
            changed.update(name for name, value in copies.items() if repr(value) != repr(passed[name]))

        if target.is_async:

            async def watched(**arguments: Any) -> Any:
                passed, copies = before(arguments)
                try:
                    return await target.call(**passed)
                finally:
                    compare(passed, copies)
        else:

            def watched(**arguments: Any) -> Any:  # type: ignore[misc]
                passed, copies = before(arguments)
                try:
                    returned = target.call(**passed)
                finally:
                    compare(passed, copies)
                return returned

        # Run in this process: changes made in a worker process would not be visible here.
        here = self.options.model_copy(update={"isolation": "thread"})
        function = type(self.function)(watched, options=here)
        if self.in_processes and not self.of_lists:
            manager: Any = NaiveRewardLoopManager(here, compute_score=function)
        else:
            manager = self._new_manager(compute_score=function)
        truths = repr([sample.ground_truth for sample in samples])
        await self.rows(samples if self.of_lists else samples[:1], manager)
        own = {"extra_info", *FIELDS} & changed
        if repr([sample.ground_truth for sample in samples]) != truths:
            own -= {"ground_truths"}  # each call has its own list, but the elements of the list are shared
        shared = changed - own
        if shared:
            text = f"it changes {listing(shared)}, which other calls share: work on a copy"
            return [Finding("arguments", "problem", text)]
        if own:
            text = f"it changes {listing(own)}: harmless here, where each call has its own, but not in verl's managers"
            return [Finding("arguments", "note", text)]
        return [Finding("arguments", "ok", "it leaves them as they are")]

    async def pickling(self, samples: Sequence[RewardSample]) -> list[Finding]:
        name = "pickling"
        if self.is_composite:
            return [Finding(name, "skipped", _ONE_BY_ONE)]
        if self.is_async:
            try:
                await asyncio.to_thread(cloudpickle.dumps, self.loaded)
            except Exception as error:
                text = f"it cannot be pickled: {type(error).__name__}: {error}. It must be named by its path, then"
                return [Finding(name, "note", text)]
            return [Finding(name, "ok", "it can be sent to other processes")]
        if self.in_processes:
            return [Finding(name, "ok", "it runs in processes, as was seen above")]
        options = self.options.model_copy(update={"isolation": "process", "max_processes": 1})
        try:
            isolated = type(self.function)(self.loaded, reward_kwargs=self.reward_kwargs, options=options)
        except FunctionLoadError as error:
            return [Finding(name, "note", str(error))]
        try:
            tried = samples if self.of_lists else samples[:1]
            rows = await self.rows(tried, self._new_manager(compute_score=isolated))
        finally:
            await asyncio.to_thread(isolated.close)
        for first, row in zip(self.first, rows, strict=False):
            if row.outcome == "failed" and first.outcome != "failed":
                return [Finding(name, "note", f"it fails in a process of its own. {_explained(row.error)}")]
            if self.same and not _same(first, row):
                text = f"it gives {_shown(row)} in a process of its own, and {_shown(first)} here"
                return [Finding(name, "note", text)]
        return [Finding(name, "ok", "it runs in a process of its own, too")]

    @contextlib.asynccontextmanager
    async def _watched_loop(self) -> AsyncIterator[None]:
        """Measure the maximum lag of the event loop within ``with``, and append it to ``lags`` (seconds)."""
        worst = 0.0

        async def tick() -> None:
            nonlocal worst
            while True:
                started = time.perf_counter()
                await asyncio.sleep(_TICK_S)
                worst = max(worst, time.perf_counter() - started - _TICK_S)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        try:
            yield
            await asyncio.sleep(2 * _TICK_S)
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
            self.lags.append(worst)


def _same(one: Row, two: Row) -> bool:
    return (one.outcome, one.score) == (two.outcome, two.score)


def _shown(row: Row) -> str:
    return row.outcome if row.score is None else f"{row.outcome} {row.score:.6g}"


def _explained(error: str) -> str:
    """Return the error, shortened if it is long, with advice if the cause is known."""
    advice = next((advice for sign, advice in _ADVICE.items() if sign in error), None)
    text = cut(error, _ERROR_CHARACTERS)
    return f"{text}\nWhat helps: {advice}" if advice else text
