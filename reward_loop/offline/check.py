"""Calls a reward function on a few samples, as a run would call it, and reports problems that would occur in a run: the
command ``reward-loop check``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Literal
from unittest import mock

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.event_loops import line_on_loop
from reward_loop._util.json import encode
from reward_loop._util.signals import run
from reward_loop._util.standard_streams import console, reserve_stdout
from reward_loop._util.text import cut, duration, first_line, shorten
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.managers.scorer import Scorer, load_scorer, scored
from reward_loop.offline import cli_options
from reward_loop.offline.attacks import PAID, WRONG, rows_of, texts_of
from reward_loop.offline.holes import NOT_CALLED, Attack, AttackReport, KindReport, Outcome
from reward_loop.offline.inputs import Fields, Inputs
from reward_loop.offline.score import for_each
from reward_loop.scoring import ListScoringFunction, ScoringFunction, load_function
from reward_loop.scoring.results import OUTSIDE_THE_MAIN_THREAD
from reward_loop.types import RewardSample, is_returned, missing

MAX_BLOCKED_S = 0.02
"""Maximum time in seconds for which a call may block the event loop, and with it all other samples."""

_CONCURRENCY = 16
_ERROR_CHARACTERS = 2000
"""Maximum number of characters of an error that are shown."""
_HUGE_CHARACTERS = 1_000_000
_HUGE_TIMEOUT_S = 30.0
_STUCK_S = 30.0
"""The seconds for which a call may block the event loop before the check ends. No deadline holds meanwhile."""
_ATTACK_S = 30.0
"""The seconds for which answers that are right or wrong are scored."""
_ATTACK_TIMEOUT_S = 10.0
_CALLS_PER_PROCESS = 64
_LOOK_S = 0.005
"""The seconds between two looks at the line that the event loop is at."""
_LINES = 8
"""Maximum number of kinds of answers that a finding lists."""
_MALFORMED = '\x00\ufffd \\boxed{1 {{ ((( ``` <think> {"a": [1, "\u202e\U0001f600 #### $$ %s %d \\x \n\r\n\t'
_NEW = ("{}\n(check)", "(check)\n{}", "(check)")
"""New answers from a response: no cache knows them."""
_ASKS_A_SERVICE = "nothing attacked: the function asks a service, which could cost money"
_AWAIT = (
    "await slow calls (sync ones with `await asyncio.to_thread(...)`), or make it a plain `def`, which runs in a thread"
)
_FLAGGED = (
    (PAID, "false positives", "problem", "wrong answers that need no reference are right: a policy is paid for them"),
    (("knows",), "holes of the rule", "note", "wrong answers that hold the reference, or are near to it, are right"),
    (("right", "form"), "refused answers", "note", "right answers are refused"),
    (("contract",), "open to dispute", "ok", "accepted, and people disagree whether they are right"),
)
"""The levels of a finding, its name, its status and its text."""

Status = Literal["ok", "note", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """The result of one sample."""

    uid: str
    outcome: str
    score: float | None
    seconds: float
    """Run time of the function, in seconds."""
    components: Mapping[str, Any]
    error: str

    @property
    def shown(self) -> str:
        """Outcome and score, for a message."""
        return self.outcome if self.score is None else f"{self.outcome} {self.score:.6g}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: str
    text: str
    """What was observed and, for a problem, what to change."""


@dataclass(slots=True)
class CheckReport:
    """The report on a function."""

    function: str
    """Name and file of the function."""
    is_async: bool
    in_processes: bool
    is_batched: bool = False
    """Whether it is a batch function, which is called with all samples at once."""
    rows: list[CheckedRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    attack: AttackReport | None = None
    """What the function accepts and refuses, if it scores by a rule."""

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
    max_blocked_s: float = MAX_BLOCKED_S,
    more: Sequence[RewardSample] = (),
) -> CheckReport:
    """Call a reward function in the ways that a run may call it, and report what goes wrong.

    All rounds run on an event loop outside of the main thread, as in a run: signals do not work there. A function that
    scores by a rule, without a judge, is also called in processes, with about 160 answers for each of a few rows.

    Args:
        function: the function, in any form that `ScoringFunction` takes. For managers such as `batch` and `group`, a
            batch function.
        samples: a few samples like those of a run.
        reward_kwargs: configured arguments of the function.
        manager: the reward manager, by name or import path.
        router_address: ``host:port`` that the function receives as ``reward_router_address``.
        options: options of the run; the policies, and the bounds on failures are ignored here.
        max_blocked_s: maximum time in seconds for which a call may block the event loop.
        more: more samples, from which only right and wrong answers are made.

    Raises:
        FunctionLoadError: the function cannot be called with the arguments of the reward loop.
        ConfigError: there are no samples, a sample is broken, or the manager does not exist.
    """
    if not samples:
        raise ConfigError("no samples were given: the check needs at least one")
    if broken := [f"{sample.uid}: {sample.error}" for sample in samples if sample.error]:
        raise ConfigError(f"{len(broken)} of {len(samples)} samples are broken. {broken[0]}")
    # Failures are reported and must not stop the check. A batch function gets all samples in one call.
    options = options or RewardLoopConfig()
    update: dict[str, Any] = {
        "max_failed_share": 1.0,
        "on_failed": "mask",
        "on_unscored": "mask",
        "max_threads": _CONCURRENCY,
        "outage_timeout_s": 0.0,  # an unreachable judge is what the check is to find
    }

    def load(batch_size: int, **more: Any) -> Scorer:
        batch = options.batch.model_copy(update={"max_batch_size": batch_size})
        changed = options.model_copy(update={**update, **more, "batch": batch})
        return load_scorer(function, manager, changed, reward_kwargs=reward_kwargs, router_address=router_address)

    loop = _MeasuredLoop()
    checks = _Checks(load(len(samples)), load, samples, [*samples, *more], max_blocked_s, loop)
    report, stuck_s = checks.report, min(_STUCK_S, checks.function.timeout or _STUCK_S)
    thread = threading.Thread(target=loop.run_forever, name="check", daemon=True)
    thread.start()
    work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(checks.run(), loop))
    try:
        while not (await asyncio.wait([work], timeout=_LOOK_S))[0]:
            if loop.look(thread) > stuck_s:
                text = f"{loop.busiest()} does not let the event loop run, and no deadline holds: the check ended"
                report.findings.append(Finding("event loop", "problem", f"{text}. Fix: {_AWAIT}"))
                return report  # the thread cannot be interrupted
        await work
    finally:
        loop.call_soon_threadsafe(loop.stop)
        # In a thread: closing waits until worker processes have ended.
        await asyncio.to_thread(checks.function.close)
    return report


class _MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that measures its longest step: what it runs between two waits.

    Unlike the delay of a timer, this does not grow when other processes use the cores while the loop waits.
    """

    def __init__(self) -> None:
        self.reset()
        super().__init__()

    def reset(self) -> None:
        """Forget the steps up to now."""
        self.longest_s, self.line = 0.0, "the function"
        self._lines, self._started = Counter[str](), math.inf

    def call_soon(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Any = None
    ) -> asyncio.Handle:
        # All steps of tasks are scheduled here.
        return super().call_soon(self._run, callback, *arguments, context=context)

    def _run(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._lines, self._started = Counter(), time.perf_counter()
        try:
            callback(*arguments)
        finally:
            seconds, self._started = time.perf_counter() - self._started, math.inf
            if seconds > self.longest_s:
                self.longest_s, self.line = seconds, self.busiest()

    def look(self, thread: threading.Thread) -> float:
        """Note the line at which the loop is; return the seconds for which its step has been running. From outside."""
        seconds = time.perf_counter() - self._started
        if seconds > 0 and (line := line_on_loop(thread.ident or 0)) is not None:
            self._lines[line] += 1
        return seconds

    def busiest(self) -> str:
        """Return the line at which the running step was most often."""
        return next((line for line, _ in self._lines.most_common(1)), "the function")


@dataclass
class _Checks:
    scorer: Scorer
    load: Callable[..., Scorer]
    samples: Sequence[RewardSample]
    attacked: Sequence[RewardSample]
    max_blocked_s: float
    loop: _MeasuredLoop
    deterministic: bool = True
    blocked: list[list[tuple[float, str]]] = field(default_factory=list)
    """For each round and call: for how many seconds it blocked the event loop, and in which line."""

    def __post_init__(self) -> None:
        self.function: Any = self.scorer.function
        is_batched = getattr(self.scorer.manager, "function_type", ScoringFunction) is ListScoringFunction
        function = self.function
        self.report = CheckReport(function.name, function.is_async, function.in_processes, is_batched)
        self._groups = itertools.count()

    async def run(self) -> None:
        """Run all rounds, and add to the report what they find."""
        rounds = (self.samples_score, self.scores_again, self.concurrent_calls, self.known_answers, self.unusual_texts)
        for find in rounds:
            await find()
            if all(row.outcome == "failed" for row in self.report.rows):
                break  # all other checks would fail for the same reason

    def find(self, check: str, status: str, text: str) -> None:
        """Add a finding."""
        self.report.findings.append(Finding(check, status, text))

    async def samples_score(self) -> None:
        rows = self.report.rows = await self._round()
        failed = [row for row in rows if row.outcome == "failed"]
        unscored = sum(row.outcome == "unscored" for row in rows)
        text = f"{len(rows) - unscored} scored, {unscored} unscored"
        scores = {row.score for row in rows if row.score is not None}
        if failed:
            share = f"{len(failed)} of {len(rows)} failed; a run would exclude them"
            self.find("samples", "problem", f"{share}. {cut(failed[0].error, _ERROR_CHARACTERS)}")
        elif not scores:
            self.find("samples", "problem", f"{text}: a run could not learn anything")
        elif len(scores) == 1 and len(rows) > 1:
            self.find("samples", "note", f"{text}, all with the same score: a run could not learn from these")
        else:
            self.find("samples", "ok", text)

    async def scores_again(self) -> None:
        first = self.report.rows
        changed = [pair for pair in zip(first, await self._round(), strict=True) if not _same(*pair)]
        self.deterministic = not changed
        if changed:
            one, two = changed[0]
            text = f"{len(changed)} of {len(first)} have another result when scored again; {one.uid}: {one.shown}, then"
            advice = "If this is not intended, fix seeds, or the judge's temperature"
            self.find("deterministic", "note", f"{text} {two.shown}. {advice}")
        else:
            self.find("deterministic", "ok", "the same results when scored again")
        if not self.function.is_async:
            where = "processes" if self.function.in_processes else "threads"
            self.find("event loop", "ok", f"the function is sync and runs in {where}, where it may block")
            return
        # The smaller of two measurements: imports and a busy machine delay one call, a blocking function each of them.
        seconds, line = max(min(pair) for pair in zip(*self.blocked, strict=True))
        if seconds <= self.max_blocked_s:
            self.find("event loop", "ok", f"not blocked for more than {duration(max(seconds, 0.001))}")
        else:
            text = f"{line} blocks the event loop for {duration(seconds)}, and with it all other samples"
            self.find("event loop", "problem", f"{text}: {_AWAIT}")

    async def concurrent_calls(self) -> None:
        function, first, count = self.function, self.report.rows, len(self.samples)
        name = "concurrent calls" if function.is_async else "processes" if function.in_processes else "threads"
        what = f"calls, {_CONCURRENCY} at a time,"
        copies = [index % count for index in range(max(_CONCURRENCY, count))]
        if self.report.is_batched:
            calls = max(2, _CONCURRENCY // count)
            what, copies = f"samples in {calls} concurrent calls", [*range(count)] * calls
            rounds = await asyncio.gather(*(self._scored(self.samples) for _ in range(calls)))
            rows = [row for made in rounds for row in made]
        else:
            rows = await self._each(self.scorer, [self.samples[index] for index in copies])
        changed = [(first[i], row) for i, row in zip(copies, rows, strict=True) if not _same(first[i], row)]
        if not self.deterministic:
            failed = sum(row.outcome == "failed" for row in rows)
            text = f"{failed} of {len(rows)} {what} failed; results are not compared, because they differ between calls"
            self.find(name, "skipped", text)
        elif not changed:
            self.find(name, "ok", f"{len(rows)} {what} have the same results as single calls")
        else:
            one, two = changed[0]
            text = (
                f"{len(changed)} of {len(rows)} {what} have other results than single calls; {one.uid}: {one.shown} in "
                f"a single call, {two.shown} in concurrent calls. Calls share changing state, such as globals, "
                "attributes or caches: use local variables, or a lock"
            )
            self.find(name, "problem", text)

    async def known_answers(self) -> None:
        """Attack the function with answers whose right verdict is known; a sync one in processes."""
        name, requires = "right and wrong answers", self.scorer.requires
        of_groups = getattr(self.scorer.manager, "needs_group", False)
        if "ground_truth" not in requires or of_groups or {"reward_router_address", "response_ids"} & requires:
            return  # it asks a judge, or compares answers with each other
        attacked = [one for one in self.attacked if not missing(one.ground_truth)]
        rows = rows_of([(one.ground_truth, _question(one.prompt), one.solution_str) for one in attacked])
        # A program may change the process that scores it; other answers may only end it.
        has_programs = any(row.type == "program" for row in rows)
        update: dict[str, Any] = {"timeout": _ATTACK_TIMEOUT_S}
        if not attacked:
            self.find(name, "skipped", "nothing attacked: no row has a ground truth")
            return
        is_async = self.function.is_async
        if is_async and has_programs:
            text = "nothing attacked: the function is async, and programs could change this process"
            self.find(name, "skipped", text)
            return
        if not is_async:
            if not self.function.in_processes and await self._asks_a_service():
                self.find(name, "skipped", _ASKS_A_SERVICE)
                return
            update |= {"isolation": "process", "calls_per_process": 1 if has_programs else _CALLS_PER_PROCESS}
        try:
            isolated = self.load(1, **update)
        except FunctionLoadError as error:
            self.find(name, "skipped", str(error))
            return
        slots, end, refused = asyncio.Semaphore(_CONCURRENCY), math.inf, list[str]()

        async def outcome(sample: RewardSample, answer: str) -> Outcome:
            nonlocal end
            async with slots:
                if refused or time.perf_counter() > end:
                    return NOT_CALLED
                cut_off = None if sample.is_truncated is None else False
                changed = replace(sample, solution_str=answer, group=None, turns=None, is_truncated=cut_off)
                row = await _row(isolated, changed)
            # Not before the first call: importing the function's module may take longer than all calls.
            end = min(end, time.perf_counter() + _ATTACK_S)
            return row.error if row.outcome == "failed" else row.score

        async def score(index: int, answers: Sequence[str]) -> list[Outcome]:
            return await asyncio.gather(*(outcome(attacked[index], answer) for answer in answers))

        try:
            with contextlib.ExitStack() as stack:
                if is_async:  # in this process: no answer may reach a service, also not the first that needs one
                    refused = stack.enter_context(_failing_requests())
                attack = await Attack(rows, score).run()
            if refused:
                self.find(name, "skipped", _ASKS_A_SERVICE)
                return
            self.report.attack = attack
            shown = ", ".join(shorten(rows[index].reference, 40) for index in attack.refused[:4])
            self.report.findings += _attack_findings(attack, shown)
            await self._elsewhere(isolated, attack.forms[0] if attack.forms else "{}")
        finally:
            await asyncio.to_thread(isolated.function.close)

    async def _asks_a_service(self) -> bool:
        """Return whether a sync function asks a service, which it may do only for some answers, or new ones."""
        timeout = self.function.timeout
        self.function.timeout = min(timeout or _ATTACK_TIMEOUT_S, _ATTACK_TIMEOUT_S)
        # A cache may know the samples; a rule before the judge may accept them, or see no answer in a changed one.
        tried = [replace(one, solution_str=text.format(one.solution_str)) for one in self.samples for text in _NEW]
        with _failing_requests() as refused:
            await self._each(self.scorer, [*self.samples, *tried])
        self.function.timeout = timeout
        return bool(refused)

    async def _elsewhere(self, isolated: Scorer, form: str) -> None:
        """Check that calls where runs call, and in the main thread of another process, have the same results."""
        function = self.function
        if not self.deterministic or function.is_async or function.in_processes or self.report.is_batched:
            return
        samples = [one for one in self.samples if not missing(one.ground_truth)]
        for sample in samples.copy():
            text = form.replace("{}", texts_of(sample.ground_truth)[0])
            samples.append(replace(sample, solution_str=text, is_truncated=None))
        here, there = await self._each(self.scorer, samples), await self._each(isolated, samples)
        changed = [three for three in zip(samples, here, there, strict=True) if not _same(*three[1:])]
        if not changed:
            self.find("other places", "ok", f"{len(samples)} calls have the same results in a worker process")
            return
        sample, one, two = changed[0]
        text = (
            f"{len(changed)} of {len(samples)} answers have other results in the main thread of a worker process; "
            f"{shorten(sample.solution_str, 60)}: {one.shown} where runs call, {two.shown} there"
        )
        if two.outcome == "failed":
            self.find("other places", "note", f"{text}: {first_line(two.error)}")
        else:
            self.find("other places", "problem", f"{text}. Fix: {OUTSIDE_THE_MAIN_THREAD}")

    async def unusual_texts(self) -> None:
        text = self.samples[0].solution_str or "x"
        responses = {
            "an empty response": "",
            "a huge response": (text * (_HUGE_CHARACTERS // len(text) + 1))[:_HUGE_CHARACTERS],
            "a malformed response": _MALFORMED,
        }
        timeout = self.function.timeout
        self.function.timeout = min(timeout or _HUGE_TIMEOUT_S, _HUGE_TIMEOUT_S)
        for name, response in responses.items():
            one = replace(self.samples[0], solution_str=response, uid=name)
            # A batch function gets this response together with normal ones, which must not fail because of it.
            row, *others = await self._scored([one, *self.samples[1:]] if self.report.is_batched else [one])
            if row.outcome == "failed":
                advice = "Policies generate such responses: return a score, or None for no score"
                if "RequestError: " in row.error:
                    advice = "The service that the function asked is the cause, not this response"
                if others and all(other.outcome == "failed" for other in others):
                    advice += f". The {len(others)} other samples of the call also failed"
                self.find(name, "problem", f"{cut(row.error, _ERROR_CHARACTERS)}\n{advice}")
            else:
                self.find(name, "ok", f"{row.shown}, in {duration(row.seconds)}")
        self.function.timeout = timeout
        if self.function.in_processes:
            return
        with _failing_requests() as refused:
            row, *_ = await self._scored(self.samples if self.report.is_batched else self.samples[:1])
        if refused and row.score is None:
            self.find("a failed request", "ok", f"{row.outcome}, when its connection was refused")
        elif refused:
            text = (
                f"{row.shown}, when its connection was refused: a run would train on this in an outage of the service. "
                "Let the error propagate, so that the call is repeated, or return None"
            )
            self.find("a failed request", "problem", text)

    async def _round(self) -> list[CheckedRow]:
        """Score all samples one after another, and measure how long each call blocks the event loop."""
        rows, blocked = list[CheckedRow](), list[tuple[float, str]]()
        for samples in [self.samples] if self.report.is_batched else [[sample] for sample in self.samples]:
            self.loop.reset()
            # A task of its own, so that no step of it began before.
            rows += await asyncio.create_task(self._scored(samples))
            blocked.append((self.loop.longest_s, self.loop.line))
        self.blocked.append(blocked)
        return rows

    async def _scored(self, samples: Sequence[RewardSample]) -> list[CheckedRow]:
        """Score samples at the same time; a batch function receives all of them in one call."""
        if getattr(self.scorer.manager, "needs_group", False):
            group = f"group {next(self._groups)}"
            samples = [replace(sample, group=group, group_size=len(samples)) for sample in samples]
        return list(await asyncio.gather(*(_row(self.scorer, sample) for sample in samples)))

    async def _each(self, scorer: Scorer, samples: Sequence[RewardSample]) -> list[CheckedRow]:
        """Score each sample in a call of its own."""
        rows: dict[int, CheckedRow] = {}

        async def run(index: int) -> None:
            rows[index] = await _row(scorer, samples[index])

        await for_each(range(len(samples)), _CONCURRENCY, run)
        return [rows[index] for index in range(len(samples))]


async def _row(scorer: Scorer, sample: RewardSample) -> CheckedRow:
    result, _ = await scored(scorer.manager, sample, sample.uid)
    components = {name: value for name, value in result.extra_info.items() if is_returned(name)}
    uid = sample.uid or ""
    return CheckedRow(uid, result.outcome, result.reward, result.work_s, components, result.error or "")


def _same(one: CheckedRow, other: CheckedRow) -> bool:
    return (one.outcome, one.score) == (other.outcome, other.score)


@contextlib.contextmanager
def _failing_requests() -> Iterator[list[str]]:
    """Refuse all connections of this process to services, also those that are open. Yields the refused calls."""
    refused: list[str] = []

    def failing(kind: type, name: str) -> Callable[..., Any]:
        usual = getattr(kind, name)

        def call(self: socket.socket, *arguments: Any) -> Any:
            if self.family not in (socket.AF_INET, socket.AF_INET6):
                return usual(self, *arguments)
            refused.append(name)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by reward-loop check")

        return call

    with contextlib.ExitStack() as stack:
        # TLS writes past the socket below it: without its own class, connections that are open would go on.
        for kind in (socket.socket, ssl.SSLSocket):
            methods: Any = {name: failing(kind, name) for name in ("connect", "connect_ex", "send", "sendall")}
            stack.enter_context(mock.patch.multiple(kind, **methods))
        yield refused


def _question(prompt: Any) -> str:
    """Return the text of a prompt; of chat messages, the last one."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _attack_findings(attack: AttackReport, refused: str) -> list[Finding]:
    """Return what the attack found: what a policy is paid for first."""
    name = "right and wrong answers"
    if attack.note:
        return [Finding(name, "note", attack.note)]
    if not attack.forms:
        (tie,) = attack.kinds
        text = f"right and wrong answers have the same score; {shorten(tie.smallest, 60)}: {tie.score:g}"
        return [Finding("false positives", "problem", text)]
    found = [
        Finding(check, status, f"{text}:\n{_listed(kinds)}")
        for levels, check, status, text in _FLAGGED
        if (kinds := attack.flagged(levels))
    ]
    if bonuses := attack.bonuses:
        shown = "\n".join(f"{one.name}: {one.bonus:.0%} for {shorten(one.bonus_for, 60)}" for one in bonuses[:_LINES])
        text = f"wrong answers that need no reference gain a part of the score:\n{shown}"
        found.append(Finding("paid style", "note", text))
    if attack.refused:
        text = f"{len(attack.refused)} of {attack.given} rows: the reference is refused in every form: {refused}"
        found.append(Finding("refused references", "problem", text))
    if crashes := [kind for kind in attack.kinds if kind.crashed]:
        shown = "\n".join(
            f"{one.name}: {one.crashed} of {one.answers} answers; {shorten(one.crash, 50)}: {first_line(one.error)}"
            for one in crashes[:_LINES]
        )
        found.append(Finding("crashes", "note", f"samples that a run would exclude:\n{shown}"))
    types = ", ".join(f"{count} {one}" for one, count in attack.types.items())
    forms = ", ".join(shorten(form, 40) for form in attack.forms)
    text = (
        f"{attack.attacked} of {attack.given} rows ({types}) attacked in {duration(attack.seconds)} with "
        f"{attack.calls} calls, in the form{'s'[: len(attack.forms) > 1]} {forms}"
    )
    if attack.graded:
        text += "; near answers are paid by their distance, so that only the full score counts as accepted"
    if attack.not_built:
        missing_kinds = ", ".join(f"{kind} ({count})" for kind, count in attack.not_built.items())
        text += f"; rows from which a kind cannot be made: {missing_kinds}"
    return [*found, Finding(name, "ok" if attack.attacked else "note", text)]


def _listed(kinds: Sequence[KindReport]) -> str:
    lines = []
    for one in kinds[:_LINES]:
        line = f"{one.name} ({one.rule}): {one.flagged} of {one.rows} rows; {shorten(one.smallest, 60)}"
        if one.level not in ("right", "form"):
            line += f" scores {one.score:g}; a group of such answers earns {one.earned / one.rows:.2g}"
            line += f", right ones {one.right / one.rows:.2g}"
        lines.append(line)
    more = [f"and {len(kinds) - _LINES} more kinds"] if len(kinds) > _LINES else []
    return "\n".join([*lines, *more])


_ATTACKED_ROWS = 50
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}


def check_command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FUNCTION] FILE",
            help="The reward function, [cyan]file.py:name[/] or [cyan]package.module:name[/], and "
            " the rollouts, in any format of [cyan]reward-loop score[/].",
            show_default=False,
        ),
    ],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to use, from the first.")] = 8,
    field: cli_options.FieldPaths = None,
    data_source: cli_options.DataSource = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    isolation: cli_options.Isolation = "thread",
    option: cli_options.MoreOptions = None,
    fail_on: Annotated[
        Literal["problem", "false-positive"],
        typer.Option(help="What sets the exit status to 1: a problem, or also each wrong answer that is accepted."),
    ] = "problem",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a reward function before a run.

    Calls the function on a few rows as the trainer would call it, then again,
    with concurrent calls, with an empty, a huge and a malformed response, and
    with its requests refused. A function that scores by a rule is attacked:
    answers that are right or wrong are made from up to 50 rows, and the report
    lists wrong ones that are accepted, right ones that are refused, and crashes.

    [bold]Example[/]

      reward-loop check reward.py:compute_score rollouts.jsonl -f solution_str=output -f ground_truth=gts

    With 8 rows, the function is called about 36 times, and a rule up to 5,000
    times in processes; requests to a paid judge cost money. Its output goes to stderr.

    Exit status: 0 no problems, 1 a problem was found, or the function cannot be
    called with the arguments that a run passes, 2 wrong usage, 130 Ctrl-C.
    """
    fn, files = cli_options.function_and_files(arguments)
    if len(files) != 1:
        raise ConfigError("name one file of rollouts: reward-loop check FUNCTION FILE")
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    given = {"isolation": isolation} | cli_options.more_options(context, option)
    options = parse(RewardLoopConfig, given, cli_options.option_name)
    paths = cli_options.pairs(field, "--field")
    with reserve_stdout() as stdout:
        if fn is not None:
            load_function(fn)  # an error here is wrong usage (status 2), one below a problem of the function (status 1)
        try:
            scorer = load_scorer(fn, manager, options, reward_kwargs=reward_kwargs, router_address=router_address)
        except FunctionLoadError as error:
            console(stderr=True).print(f"[bold red]problem:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
        fields = Fields(paths, data_source=data_source, requires=scorer.requires)
        read = islice(Inputs.open(files[0]).rows(), max(rows, _ATTACKED_ROWS))
        samples = [fields.to_sample(row) for row in read]
        checking = check(
            scorer.loaded,
            samples[:rows],
            reward_kwargs=reward_kwargs,
            manager=manager,
            router_address=router_address,
            options=options,
            more=[sample for sample in samples[rows:] if not sample.error],
        )
        report = run(checking)
        if as_json:
            stdout.write(encode(asdict(report) | {"problems": len(report.problems)}).decode() + "\n")
        else:
            _show(report, console(stdout))
    accepted = report.attack.flagged(WRONG) if report.attack is not None and fail_on == "false-positive" else []
    if report.problems or accepted:
        raise typer.Exit(1)


def _show(report: CheckReport, out: Console) -> None:
    table = Table("sample", "outcome", box=None, pad_edge=False)
    table.add_column("score", justify="right")
    table.add_column("time", justify="right")
    table.add_column("other values")
    for row in report.rows:
        components = ", ".join(f"{name}={shorten(value, 24)}" for name, value in row.components.items())
        score = "" if row.score is None else f"{row.score:.6g}"
        others = row.error.splitlines()[0] if row.error else components
        table.add_row(row.uid, row.outcome, score, duration(row.seconds), escape(cut(others, 70)))
    kind = f"sync, called in {'processes' if report.in_processes else 'threads'}"
    kind = "async, awaited on the event loop" if report.is_async else kind
    kind += f", with lists of {len(report.rows)} samples" if report.is_batched else ""
    out.print(f"{escape(report.function)}: {kind}")
    out.print()
    out.print(table)
    out.print()
    checks = Table.grid(padding=(0, 2))
    for finding in report.findings:
        style = _STYLES[finding.status]
        checks.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.text))
    out.print(checks)
    count = len(report.problems)
    out.print(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
