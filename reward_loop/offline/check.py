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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from reward_loop._util.text import counted, cut, duration, first_line, shorten
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.managers.scorer import Scorer, load_scorer, scored, scores_groups
from reward_loop.offline import cli_options
from reward_loop.offline.attacks import PAID, WRONG, AttackedRow, rows_of, texts_of
from reward_loop.offline.holes import NOT_CALLED, Attack, AttackReport, KindReport, Outcome
from reward_loop.offline.inputs import Fields, Inputs
from reward_loop.offline.score import for_each
from reward_loop.scoring import ListScoringFunction, ScoringFunction, load_function
from reward_loop.scoring.results import OUTSIDE_THE_MAIN_THREAD
from reward_loop.types import RESERVED_KEYS, RewardSample, missing

MAX_BLOCKED_S = 0.02
"""Maximum time in seconds for which a call may block the event loop, and with it all other samples."""

_CONCURRENCY = 16
_ERROR_CHARACTERS = 2000
"""Maximum number of characters of an error that are shown."""
_HUGE_CHARACTERS = 1_000_000
_ODD_TIMEOUT_S = 30.0
"""The deadline of calls with responses that a policy would hardly write."""
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
_AWAIT = (
    "await slow calls (sync ones with `await asyncio.to_thread(...)`), or make it a plain `def`, which runs in a thread"
)
_ATTACKED = "right and wrong answers"
_FLAGGED = (
    (PAID, "false positives", "problem", "wrong answers that need no reference are right: a policy is paid for them"),
    (("knows",), "holes of the rule", "note", "wrong answers that hold the reference, or are near to it, are right"),
    (("right", "form"), "refused answers", "note", "right answers are refused"),
    (("contract",), "open to dispute", "ok", "accepted, and people disagree whether they are right"),
)
"""The levels of a finding, its name, its status and its text."""


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


_Found = tuple[str, str, str]
"""The parts of a `Finding`."""


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
    def place(self) -> str:
        """Where the function is called at the same time."""
        return "concurrent calls" if self.is_async else "processes" if self.in_processes else "threads"

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
                text = f"{loop.seen} does not let the event loop run, and no deadline holds: the check ended"
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

    longest_s, line, seen, _started = 0.0, "the function", "the function", math.inf

    def reset(self) -> None:
        """Forget the steps up to now."""
        self.longest_s, self.line, self._started = 0.0, "the function", math.inf

    def call_soon(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Any = None
    ) -> asyncio.Handle:
        # All steps of tasks are scheduled here.
        return super().call_soon(self._run, callback, *arguments, context=context)

    def _run(self, callback: Callable[..., object], *arguments: Any) -> None:
        self.seen, self._started = "the function", time.perf_counter()
        try:
            callback(*arguments)
        finally:
            seconds, self._started = time.perf_counter() - self._started, math.inf
            if seconds > self.longest_s:
                self.longest_s, self.line = seconds, self.seen

    def look(self, thread: threading.Thread) -> float:
        """Note the line at which the loop is; return the seconds for which its step has been running. From outside."""
        seconds = time.perf_counter() - self._started
        if seconds > 0:
            self.seen = line_on_loop(thread.ident or 0) or self.seen
        return seconds


@dataclass
class _Checks:
    scorer: Scorer
    load: Callable[..., Scorer]
    samples: Sequence[RewardSample]
    attacked: Sequence[RewardSample]
    max_blocked_s: float
    loop: _MeasuredLoop
    deterministic: bool = True

    def __post_init__(self) -> None:
        function = self.function = self.scorer.function
        is_batched = getattr(self.scorer.manager, "function_type", ScoringFunction) is ListScoringFunction
        self.report = CheckReport(function.name, function.is_async, function.in_processes, is_batched)
        self.calls = [self.samples] if is_batched else [[sample] for sample in self.samples]
        """The samples of each call."""
        self.of_groups, self._groups = scores_groups(self.scorer.manager), itertools.count()

    async def run(self) -> None:
        """Run all rounds, and add to the report what they find."""
        rounds = (self.single_calls, self.concurrent_calls, self.known_answers, self.unusual_texts)
        for findings in rounds:
            async for found in findings():
                self.report.findings.append(Finding(*found))
                if all(row.outcome == "failed" for row in self.report.rows):
                    return  # all other checks would fail for the same reason

    async def single_calls(self) -> AsyncIterator[_Found]:
        """Score all samples one after another, and again."""
        rows, blocked = await self._scored(self.calls)
        self.report.rows = rows
        counts = Counter(row.outcome for row in rows)
        text = ", ".join(f"{counts[name]} {name}" for name in ("scored", "unscored", "failed") if counts[name])
        scores = {row.score for row in rows if row.score is not None}
        if counts["failed"]:
            error = next(row.error for row in rows if row.outcome == "failed")
            yield "samples", "problem", f"{text}; a run would exclude failed ones. {cut(error, _ERROR_CHARACTERS)}"
        elif len(scores) < min(2, len(rows)):
            status = "note" if scores else "problem"
            yield "samples", status, f"{text}: a run could not learn from these, whose scores are equal or missing"
        else:
            yield "samples", "ok", text
        again, blocked_again = await self._scored(self.calls)
        text = _differences(rows, again, "first", "when scored again")
        self.deterministic = not text
        if text:
            yield "deterministic", "note", f"{text}. If this is not intended, fix seeds, or the judge's temperature"
        else:
            yield "deterministic", "ok", "the same results when scored again"
        # The smaller of two measurements: imports and a busy machine delay one call, a blocking function each of them.
        seconds, line = max(map(min, blocked, blocked_again))
        if not self.function.is_async:
            yield "event loop", "ok", f"the function is sync and runs in {self.report.place}, where it may block"
        elif seconds <= self.max_blocked_s:
            yield "event loop", "ok", f"not blocked for more than {duration(max(seconds, 0.001))}"
        else:
            text = f"{line} blocks the event loop for {duration(seconds)}, and with it all other samples"
            yield "event loop", "problem", f"{text}: {_AWAIT}"

    async def concurrent_calls(self) -> AsyncIterator[_Found]:
        """Score all samples in many calls at a time."""
        if not self.deterministic:
            yield self.report.place, "skipped", "concurrent calls are not compared: results differ between calls"
            return
        count = max(2, len(self.calls), _CONCURRENCY // len(self.calls[0]))
        rows, _ = await self._scored([*itertools.islice(itertools.cycle(self.calls), count)], at_once=_CONCURRENCY)
        text = _differences(itertools.cycle(self.report.rows), rows, "in a single call", "in concurrent calls")
        if text:
            shared = "Calls share changing state, such as globals, attributes or caches: use local variables, or a lock"
            yield self.report.place, "problem", f"{text}. {shared}"
        else:
            text = f"{len(rows)} samples in {count} concurrent calls have the same results as single calls"
            yield self.report.place, "ok", text

    async def known_answers(self) -> AsyncIterator[_Found]:
        """Attack the function with answers whose right verdict is known; a sync one in processes."""
        self.function.timeout = min(self.function.timeout or _ODD_TIMEOUT_S, _ODD_TIMEOUT_S)
        requires, is_async = self.scorer.requires, self.function.is_async
        if "ground_truth" not in requires or self.of_groups or {"reward_router_address", "response_ids"} & requires:
            return  # it asks a judge, or compares answers with each other
        attacked = [one for one in self.attacked if not missing(one.ground_truth)]
        rows = rows_of([(one.ground_truth, _question(one.prompt), one.solution_str) for one in attacked])
        # A program may change the process that scores it; other answers may only end it.
        has_programs = any(row.type == "program" for row in rows)
        options: dict[str, Any] = {"timeout": _ATTACK_TIMEOUT_S}
        if not is_async:
            options |= {"isolation": "process", "calls_per_process": 1 if has_programs else _CALLS_PER_PROCESS}
        reason = ""
        if not attacked:
            reason = "no row has a ground truth"
        elif is_async and has_programs:
            reason = "the function is async, and programs could change this process"
        elif await self._asks_a_service():
            reason = "the function asks a service, which could cost money"
        else:
            try:
                isolated = self.load(1, **options)
            except FunctionLoadError as error:
                reason = str(error)
        if reason:
            yield _ATTACKED, "skipped", f"nothing attacked: {reason}"
            return
        slots, end = asyncio.Semaphore(_CONCURRENCY), math.inf

        async def outcome(sample: RewardSample, answer: str) -> Outcome:
            nonlocal end
            async with slots:
                if time.perf_counter() > end:
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
            # An async function is called in this process: no answer may reach a service, also not the first one.
            with _failing_requests() if is_async else contextlib.nullcontext():
                attack = self.report.attack = await Attack(rows, score).run()
            for found in _attack_findings(attack, rows):
                yield found
            if self.deterministic and self.report.place == "threads" and not self.report.is_batched:
                yield await self._elsewhere(isolated, attack.forms[0] if attack.forms else "{}")
        finally:
            await asyncio.to_thread(isolated.function.close)

    async def _asks_a_service(self) -> bool:
        """Return whether a function asks a service, which it may do only for some answers, or new ones."""
        # A cache may know the samples; a rule before the judge may accept them, or see no answer in a changed one.
        tried = [replace(one, solution_str=text.format(one.solution_str)) for one in self.samples for text in _NEW]
        with _failing_requests() as refused:
            await self._scored([[sample] for sample in (*self.samples, *tried)], at_once=_CONCURRENCY)
        return bool(refused)

    async def _elsewhere(self, isolated: Scorer, form: str) -> _Found:
        """Check that calls where runs call, and in the main thread of another process, have the same results."""
        samples = [one for one in self.samples if not missing(one.ground_truth)]
        for sample in samples.copy():
            text = form.replace("{}", texts_of(sample.ground_truth)[0])
            samples.append(replace(sample, solution_str=text, uid=shorten(text, 60), is_truncated=None))
        calls = [[sample] for sample in samples]
        here, there = [(await self._scored(calls, one, at_once=_CONCURRENCY))[0] for one in (self.scorer, isolated)]
        if not (text := _differences(here, there, "where runs call", "in the main thread of a worker process")):
            return "other places", "ok", f"{len(samples)} calls have the same results in a worker process"
        if any(row.outcome == "failed" for row in there):
            return "other places", "note", text
        return "other places", "problem", f"{text}. Fix: {OUTSIDE_THE_MAIN_THREAD}"

    async def unusual_texts(self) -> AsyncIterator[_Found]:
        """Score texts that policies generate, and samples while requests fail."""
        text = self.samples[0].solution_str or "x"
        responses = {
            "an empty response": "",
            "a huge response": (text * (_HUGE_CHARACTERS // len(text) + 1))[:_HUGE_CHARACTERS],
            "a malformed response": _MALFORMED,
        }
        for name, response in responses.items():
            # A batch function gets this response together with normal ones, which must not fail because of it.
            odd = [replace(self.samples[0], solution_str=response, uid=name), *self.calls[0][1:]]
            (row, *others), _ = await self._scored([odd])
            if row.outcome == "failed":
                advice = "Policies generate such responses: return a score, or None for no score"
                if "RequestError: " in row.error:
                    advice = "The service that the function asked is the cause, not this response"
                if others and all(other.outcome == "failed" for other in others):
                    advice += f". The {len(others)} other samples of the call also failed"
                yield name, "problem", f"{cut(row.error, _ERROR_CHARACTERS)}\n{advice}"
            else:
                yield name, "ok", f"{row.shown}, in {duration(row.seconds)}"
        with _failing_requests() as refused:
            (row, *_), _ = await self._scored(self.calls[:1])
        if refused and row.score is None:
            yield "a failed request", "ok", f"{row.outcome}, when its connection was refused"
        elif refused:
            text = (
                f"{row.shown}, when its connection was refused: a run would train on this in an outage of the service. "
                "Let the error propagate, so that the call is repeated, or return None"
            )
            yield "a failed request", "problem", text

    async def _scored(
        self, calls: Sequence[Sequence[RewardSample]], scorer: Scorer | None = None, *, at_once: int = 1
    ) -> tuple[list[CheckedRow], list[tuple[float, str]]]:
        """Return the results, and for how many seconds each call blocked the event loop, and in which line.

        Args:
            calls: the samples of each call; only a batch function receives several in one.
            scorer: another scorer than that of the run.
            at_once: the number of calls at a time. Only of single ones, the time is that of a call.
        """
        rows, blocked = dict[int, list[CheckedRow]](), dict[int, tuple[float, str]]()

        async def call(index: int) -> None:
            samples, group = calls[index], f"group {next(self._groups)}"
            if self.of_groups:
                samples = [replace(sample, group=group, group_size=len(samples)) for sample in samples]
            self.loop.reset()
            # Tasks of their own, so that no step of them began before.
            rows[index] = await asyncio.gather(*(_row(scorer or self.scorer, sample) for sample in samples))
            blocked[index] = self.loop.longest_s, self.loop.line

        await for_each(range(len(calls)), at_once, call)
        return [row for index in range(len(calls)) for row in rows[index]], [*blocked.values()]


async def _row(scorer: Scorer, sample: RewardSample) -> CheckedRow:
    result, _ = await scored(scorer.manager, sample, sample.uid)
    components = {name: value for name, value in result.extra_info.items() if name not in RESERVED_KEYS}
    uid = sample.uid or ""
    return CheckedRow(uid, result.outcome, result.reward, result.work_s, components, result.error or "")


def _differences(rows: Iterable[CheckedRow], others: Iterable[CheckedRow], here: str, there: str) -> str:
    """Return how many results differ, and the first ones; empty if none does."""
    pairs = [*zip(rows, others, strict=False)]
    changed = [(one, two) for one, two in pairs if (one.outcome, one.score) != (two.outcome, two.score)]
    text = f"{len(changed)} of {len(pairs)} results differ; "
    return "".join(f"{text}{one.uid}: {one.shown} {here}, {two.shown} {there}" for one, two in changed[:1])


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


def _attack_findings(attack: AttackReport, rows: Sequence[AttackedRow]) -> Iterator[_Found]:
    """Yield what the attack found: what a policy is paid for first."""
    if attack.note:
        yield _ATTACKED, "note", attack.note
        return
    if not attack.forms:
        (tie,) = attack.kinds
        text = f"right and wrong answers have the same score; {shorten(tie.smallest, 60)}: {tie.score:g}"
        yield "false positives", "problem", text
        return
    for levels, check, status, text in _FLAGGED:
        if kinds := attack.flagged(levels):
            yield check, status, f"{text}:\n{_listed(_flagged_line(kind) for kind in kinds)}"
    if attack.bonuses:
        shown = _listed(f"{one.name}: {one.bonus:.0%} for {shorten(one.bonus_for, 60)}" for one in attack.bonuses)
        yield "paid style", "note", f"wrong answers that need no reference gain a part of the score:\n{shown}"
    if attack.refused:
        shown = ", ".join(shorten(rows[index].reference, 40) for index in attack.refused[:4])
        text = f"{len(attack.refused)} of {attack.given} rows: the reference is refused in every form: {shown}"
        yield "refused references", "problem", text
    if crashes := [kind for kind in attack.kinds if kind.crashed]:
        shown = _listed(
            f"{one.name}: {one.crashed} of {one.answers} answers; {shorten(one.crash, 50)}: {first_line(one.error)}"
            for one in crashes
        )
        yield "crashes", "note", f"samples that a run would exclude:\n{shown}"
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
    yield _ATTACKED, "ok" if attack.attacked else "note", text


def _flagged_line(kind: KindReport) -> str:
    line = f"{kind.name} ({kind.rule}): {kind.flagged} of {kind.rows} rows; {shorten(kind.smallest, 60)}"
    if kind.level in ("right", "form"):
        return line
    earned = f"a group of such answers earns {kind.earned / kind.rows:.2g}, right ones {kind.right / kind.rows:.2g}"
    return f"{line} scores {kind.score:g}; {earned}"


def _listed(lines: Iterable[str]) -> str:
    shown = [*lines]
    more = [f"and {len(shown) - _LINES} more kinds"] if len(shown) > _LINES else []
    return "\n".join([*shown[:_LINES], *more])


_ATTACKED_ROWS = 50
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}


def check_command(
    context: typer.Context,
    function: cli_options.Function,
    file: cli_options.Rollouts,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to use, from the first.")] = 8,
    field: cli_options.FieldPaths = None,
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
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    options = cli_options.config(context, option, {"isolation": isolation})
    paths = cli_options.pairs(field, "--field")
    with reserve_stdout() as stdout:
        loaded = load_function(function)  # an error here is wrong usage (2), one below a problem of the function (1)
        try:
            scorer = load_scorer(loaded, manager, options, reward_kwargs=reward_kwargs, router_address=router_address)
        except FunctionLoadError as error:
            console(stderr=True).print(f"[bold red]problem:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
        fields = Fields(paths, requires=scorer.requires)
        samples = [fields.to_sample(row) for row in itertools.islice(Inputs(file).rows(), max(rows, _ATTACKED_ROWS))]
        checking = check(
            loaded,
            samples[:rows],
            reward_kwargs=reward_kwargs,
            manager=manager,
            router_address=router_address,
            options=options,
            more=[sample for sample in samples[rows:] if not sample.error],
        )
        with console(stderr=True).status("checking"):
            report = run(checking)
        if as_json:
            stdout.write(encode(asdict(report) | {"problems": len(report.problems)}).decode() + "\n")
        else:
            _show(report, console(stdout))
    accepted = report.attack.flagged(WRONG) if report.attack is not None and fail_on == "false-positive" else []
    if report.problems or accepted:
        raise typer.Exit(1)


def _show(report: CheckReport, out: Console) -> None:
    table = Table("sample", "outcome", "score", "time", "other values", box=None, pad_edge=False)
    for row in report.rows:
        components = ", ".join(f"{name}={shorten(value, 24)}" for name, value in row.components.items())
        score = "" if row.score is None else f"{row.score:.6g}"
        others = row.error.partition("\n")[0] or components
        table.add_row(row.uid, row.outcome, score, duration(row.seconds), escape(cut(others, 70)))
    kind = "async, awaited on the event loop" if report.is_async else f"sync, called in {report.place}"
    kind += f", with lists of {len(report.rows)} samples" if report.is_batched else ""
    checks = Table.grid(padding=(0, 2))
    for finding in report.findings:
        style = _STYLES[finding.status]
        checks.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.text))
    for part in (f"{escape(report.function)}: {kind}", table, checks):
        out.print(part)
        out.print()
    out.print(f"{counted(len(report.problems), 'problem') if report.problems else 'no problems'} found")
