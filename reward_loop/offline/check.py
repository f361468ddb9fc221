"""Calls a reward function on a few samples, as a run would call it, and reports problems that would occur in a run."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reward_loop._util.text import cut, duration, shorten
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.offline.check_calls import Callee, Calls, CheckedRow, Finding, StepTimer
from reward_loop.offline.known_answers import TEMPLATES, KnownAnswers, find_pair, right_answers
from reward_loop.types import RewardSample

MAX_BLOCKED_S = 0.02
"""Maximum time in seconds for which a call may block the event loop, and with it all other samples."""

AWAIT = (
    "await slow calls (sync ones with `await asyncio.to_thread(...)`), or make it a plain `def`, which runs in a thread"
)
"""What to change in a function that blocks the event loop."""

_ERROR_CHARACTERS = 2000
"""Maximum number of characters of an error that are shown."""
_HUGE_CHARACTERS = 1_000_000
_HUGE_TIMEOUT_S = 30.0
_STUCK_S = 30.0
"""The seconds for which a call may block the event loop before the check ends. No deadline holds meanwhile."""
_MAX_SOURCES = 4
_MALFORMED = '\x00\ufffd \\boxed{1 {{ ((( ``` <think> {"a": [1, "\u202e\U0001f600 #### $$ %s %d \\x \n\r\n\t'
_OWN_LOOP = "the function runs its own event loop: make it `async def` and use await"
_ADVICE = {
    "only works in main thread": "signals do not work in threads: decorate the function with @reward_loop.isolated",
    "event loop is already running": _OWN_LOOP,
    "cannot be called from a running event loop": _OWN_LOOP,
}


@dataclass(slots=True)
class CheckReport:
    """The report on a function."""

    functions: list[Callee]
    """The function."""
    is_batched: bool = False
    """Whether it is a batch function, which is called with all samples at once."""
    rows: list[CheckedRow] = field(default_factory=list)
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
    max_blocked_s: float = MAX_BLOCKED_S,
    in_process: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
    on_stuck: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Call a reward function in the ways that a run may call it, and report what goes wrong.

    The function is called about ``2 * len(samples) + concurrency + 3`` times, and a sync one about 40 times more, for
    answers that are known to be right or wrong, and in a process. A batch function is called about
    ``concurrency / len(samples) + 5`` times, each time with all samples.

    Args:
        function: the function, in any form that `ScoringFunction` takes. For managers such as `batch` and `group`, a
            batch function.
        samples: a few samples like those of a run.
        reward_kwargs: configured arguments of the function.
        manager: the reward manager, by name or import path.
        router_address: ``host:port`` that the function receives as ``reward_router_address``.
        options: options of the run; the policies, and the bounds on failures are ignored here.
        concurrency: maximum number of calls in flight when concurrent calls are tested.
        max_blocked_s: maximum time in seconds for which a call may block the event loop.
        in_process: whether to compare calls of a sync function in threads with calls in a worker process.
        on_step: called with a description of each step before it starts.
        on_stuck: called in another thread with the line of code that has blocked the event loop for 30 s, or for the
            deadline of a call if that is shorter.

    Raises:
        FunctionLoadError: the function cannot be called with the arguments of the reward loop.
        ConfigError: there are no samples, a sample is broken, or the manager does not exist.
    """
    if not samples:
        raise ConfigError("no samples were given: the check needs at least one")
    if broken := [f"{sample.uid}: {sample.error}" for sample in samples if sample.error]:
        raise ConfigError(f"{len(broken)} of {len(samples)} samples are broken. {broken[0]}")
    options = options or RewardLoopConfig()
    calls_with = functools.partial(
        Calls,
        function,
        len(samples),
        manager=manager,
        reward_kwargs=reward_kwargs,
        router_address=router_address,
        concurrency=concurrency,
    )
    calls = calls_with(options=options)
    stuck_s = min(_STUCK_S, calls.function.timeout or _STUCK_S)
    checks = _Checks(calls, samples, concurrency, max_blocked_s, stuck_s, on_stuck)
    in_worker = None
    if in_process and checks.scores_by_rule and not calls.in_processes:
        isolated = options.model_copy(update={"isolation": "process", "max_processes": 1})
        in_worker = functools.partial(calls_with, options=isolated)
    report = CheckReport([calls.callee()], calls.is_batched)
    rounds: list[tuple[str, Callable[[], Awaitable[list[Finding]]]]] = [
        ("the samples", checks.samples_score),
        ("the samples again", checks.scores_again),
        ("concurrent calls", checks.concurrent_calls),
        ("right and wrong answers", checks.known_answers),
        ("calls in a process", functools.partial(checks.calls_in_a_process, in_worker)),
        ("unusual responses", checks.unusual_responses),
    ]
    try:
        for step, find in rounds:
            on_step(step)
            report.findings += await find()
            if all(row.outcome == "failed" for row in checks.first):
                break  # all other checks would fail for the same reason
    finally:
        # In a thread: closing waits until worker processes have ended.
        await asyncio.to_thread(calls.close)
    report.rows = checks.first
    return report


@dataclass
class _Checks:
    calls: Calls
    samples: Sequence[RewardSample]
    concurrency: int
    max_blocked_s: float
    stuck_s: float
    on_stuck: Callable[[str], None]
    known: list[KnownAnswers] = field(default_factory=list)
    """A right and a wrong answer of each data source."""
    first: list[CheckedRow] = field(default_factory=list)
    """The results of the first round."""
    deterministic: bool = True
    blocked: list[list[StepTimer]] = field(default_factory=list)
    """For each round: for how many seconds each call blocked the event loop."""

    @property
    def scores_by_rule(self) -> bool:
        """Whether the function compares an answer with the ground truth itself, without asking a judge."""
        calls = self.calls
        is_plain = not (calls.is_async or calls.is_batched or "reward_router_address" in calls.requires)
        return is_plain and "ground_truth" in calls.requires

    async def samples_score(self) -> list[Finding]:
        self.first = await self._round()
        failed = [row for row in self.first if row.outcome == "failed"]
        unscored = sum(row.outcome == "unscored" for row in self.first)
        if failed:
            share = f"{len(failed)} of {len(self.first)} failed; a run would exclude them"
            return [Finding("samples", "problem", f"{share}. {_explained(failed[0].error)}")]
        text = f"{len(self.first) - unscored} scored, {unscored} unscored"
        if unscored == len(self.first):
            return [Finding("samples", "problem", f"{text}: a run could not learn anything")]
        scores = {row.score for row in self.first if row.score is not None}
        if len(scores) == 1 and len(self.first) > 1:
            return [Finding("samples", "note", f"{text}, all with the same score: a run could not learn from these")]
        return [Finding("samples", "ok", text)]

    async def scores_again(self) -> list[Finding]:
        second = await self._round()
        changed = [(one, two) for one, two in zip(self.first, second, strict=True) if not one.same(two)]
        self.deterministic = not changed
        if changed:
            one, two = changed[0]
            text = (
                f"{len(changed)} of {len(self.samples)} have another result when scored again; {one.uid}: {one.shown}, "
                f"then {two.shown}. If this is not intended, fix seeds, or the judge's temperature"
            )
            found = [Finding("deterministic", "note", text)]
        else:
            found = [Finding("deterministic", "ok", "the same results when scored again")]
        return [*found, self._blocking()]

    def _blocking(self) -> Finding:
        if not self.calls.is_async:
            where = "processes" if self.calls.in_processes else "threads"
            return Finding("event loop", "ok", f"the function is sync and runs in {where}, where it may block")
        # The smaller of two measurements: imports and a busy machine delay one call, a blocking function each of them.
        both = [min(pair, key=lambda timer: timer.longest_s) for pair in zip(*self.blocked, strict=True)]
        longest = max(both, key=lambda timer: timer.longest_s)
        blocked = longest.longest_s
        if blocked <= self.max_blocked_s:
            return Finding("event loop", "ok", f"not blocked for more than {duration(max(blocked, 0.001))}")
        return Finding(
            "event loop",
            "problem",
            f"{longest.line or 'the function'} blocks the event loop for {duration(blocked)}, and with it all other "
            f"samples: {AWAIT}",
        )

    async def concurrent_calls(self) -> list[Finding]:
        name = "concurrent calls" if self.calls.is_async else "processes" if self.calls.in_processes else "threads"
        count = len(self.samples)
        if self.calls.is_batched:
            calls = max(2, self.concurrency // count)
            what = f"samples in {calls} concurrent calls"
            rounds = await asyncio.gather(*(self.calls.run(self.samples) for _ in range(calls)))
            rows, copies = [row for made in rounds for row in made], [*range(count)] * calls
        else:
            what = f"calls, {self.concurrency} at a time,"
            copies = [index % count for index in range(max(self.concurrency, count))]
            rows = await self.calls.run_each([self.samples[index] for index in copies], self.concurrency)
        if not self.deterministic:
            failed = sum(row.outcome == "failed" for row in rows)
            text = f"{failed} of {len(rows)} {what} failed; results are not compared, because they differ between calls"
            return [Finding(name, "skipped", text)]
        changed = [(self.first[i], row) for i, row in zip(copies, rows, strict=True) if not self.first[i].same(row)]
        if not changed:
            return [Finding(name, "ok", f"{len(rows)} {what} have the same results as single calls")]
        one, two = changed[0]
        text = (
            f"{len(changed)} of {len(rows)} {what} have other results than single calls; {one.uid}: {one.shown} in a "
            f"single call, {two.shown} in concurrent calls. Calls share changing state, such as globals, attributes or "
            "caches: use local variables, or a lock"
        )
        return [Finding(name, "problem", text)]

    async def known_answers(self) -> list[Finding]:
        """Check that an answer made from the ground truth scores more than that of another sample."""
        if not self.scores_by_rule:
            return []
        name, found = "right and wrong answers", []
        sources = list(dict.fromkeys(sample.data_source for sample in self.samples))
        for source in sources[:_MAX_SOURCES]:
            samples = [sample for sample in self.samples if sample.data_source == source]
            truths = [sample.ground_truth for sample in samples]
            pair = await find_pair(samples[0], truths, self._score)
            about = f"data source {source!r}: " if len(sources) > 1 else ""
            if isinstance(pair, str):
                text = f"{about}{pair}. Tried were {len(TEMPLATES)} forms, such as \\boxed{{}} and ####"
                found.append(Finding(name, "note", text))
                continue
            self.known.append(pair)
            shown = [shorten(answer.solution_str, 40) for answer in (pair.right, pair.wrong)]
            best = max((row.score for row in self.first if row.score is not None), default=pair.score)
            text = f"{about}{shown[0]} scores {pair.score:g}, and {shown[1]} scores {pair.wrong_score:g}"
            if pair.score < best:
                text += f"; a row scores {best:g}"
            found.append(Finding(name, "ok", text))
        return found

    async def _score(self, answer: RewardSample) -> float | None:
        (row,) = await self.calls.run([answer])
        return row.score

    async def calls_in_a_process(self, in_worker: Callable[[], Calls] | None) -> list[Finding]:
        """Check that calls in threads and in a worker process have the same results."""
        if in_worker is None:
            return []
        name = "threads and processes"
        if not self.deterministic:
            return [Finding(name, "skipped", "results are not compared, because they differ between calls")]
        answers = [replace(self.samples[0], solution_str=text) for text in right_answers(self.samples[0])]
        answers = [*self.samples, *answers]
        try:
            calls = in_worker()
        except FunctionLoadError as error:
            return [Finding(name, "skipped", str(error))]
        try:
            others = await calls.run_each(answers, 1)
        finally:
            await asyncio.to_thread(calls.close)
        rows = [*self.first, *await self.calls.run_each(answers[len(self.samples) :], 1)]
        pairs = zip(answers, rows, others, strict=True)
        changed = [(answer, one, other) for answer, one, other in pairs if not one.same(other)]
        if not changed:
            return [Finding(name, "ok", f"{len(answers)} calls have the same results in a worker process")]
        answer, one, other = changed[0]
        text = (
            f"{len(changed)} of {len(answers)} answers have other results in a worker process; "
            f"{shorten(answer.solution_str, 60)}: {one.shown} in a thread, {other.shown} in a process"
        )
        if other.outcome == "failed":
            return [Finding(name, "note", f"{text}. {_explained(other.error)}")]
        text += ". Signals, such as alarms of Math-Verify, only work in a process: set isolation=process"
        return [Finding(name, "problem", text)]

    async def unusual_responses(self) -> list[Finding]:
        text = self.samples[0].solution_str or "x"
        responses = {
            "an empty response": "",
            "a huge response": (text * (_HUGE_CHARACTERS // len(text) + 1))[:_HUGE_CHARACTERS],
            "a malformed response": _MALFORMED,
        }
        function, timeout = self.calls.function, self.calls.function.timeout
        function.timeout = min(timeout or _HUGE_TIMEOUT_S, _HUGE_TIMEOUT_S)
        found = []
        full = self.known[0].score if self.known else math.inf
        # The huge response repeats an answer, which may be right.
        own = self.first[0].score if self.first else None
        right = {responses["a huge response"]} if own is not None and own >= full else set()
        try:
            for name, response in responses.items():
                one = replace(self.samples[0], solution_str=response, uid=name)
                # A batch function gets this response together with normal ones, which must not fail because of it.
                row, *others = await self.calls.run([one, *self.samples[1:]] if self.calls.is_batched else [one])
                if row.outcome == "failed":
                    advice = "Policies generate such responses: return a score, or None for no score"
                    if others and all(other.outcome == "failed" for other in others):
                        advice += f". The {len(others)} other samples of the call also failed"
                    found.append(Finding(name, "problem", f"{_explained(row.error)}\n{advice}"))
                elif response not in right and row.score is not None and row.score >= full:
                    found.append(Finding(name, "problem", f"{row.shown}, no less than a right answer"))
                else:
                    found.append(Finding(name, "ok", f"{row.shown}, in {duration(row.seconds)}"))
        finally:
            function.timeout = timeout
        return found

    async def _round(self) -> list[CheckedRow]:
        """Score all samples one after another, and add the longest step of each call to ``blocked``."""
        rows: list[CheckedRow] = []
        blocked = []
        for samples in [self.samples] if self.calls.is_batched else [[sample] for sample in self.samples]:
            with StepTimer(self.stuck_s, self.on_stuck) as timer:
                # A task of its own: the timer measures only tasks that are created while it is open.
                rows += await asyncio.create_task(self.calls.run(samples))
            blocked.append(timer)
        self.blocked.append(blocked)
        return rows


def _explained(error: str) -> str:
    """Return the error, shortened if it is long, with advice if the cause is known."""
    advice = next((advice for sign, advice in _ADVICE.items() if sign in error), None)
    text = cut(error, _ERROR_CHARACTERS)
    return f"{text}\nFix: {advice}" if advice else text
