"""Calls a reward function on a few samples, as a run would call it, and reports problems that would occur in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reward_loop._util.text import cut, duration, first_line, shorten
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.offline.attacked_rows import AttackedRow, rows_of, texts_of
from reward_loop.offline.attacks import PAID
from reward_loop.offline.check_calls import (
    Callee,
    Calls,
    CheckedRow,
    Finding,
    StepTimer,
    failing_requests,
    outside_the_main_thread,
)
from reward_loop.offline.holes import NOT_CALLED, Attack, AttackReport, IsolatedScores, KindReport, WaitsForServiceError
from reward_loop.scoring.results import OUTSIDE_THE_MAIN_THREAD
from reward_loop.scoring.signature import resolve
from reward_loop.types import RewardSample, missing

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
_ATTACK_S = 30.0
"""The seconds for which answers that are right or wrong are scored."""
_LINES = 8
"""Maximum number of kinds of answers that a finding lists."""
_MALFORMED = '\x00\ufffd \\boxed{1 {{ ((( ``` <think> {"a": [1, "\u202e\U0001f600 #### $$ %s %d \\x \n\r\n\t'
_OWN_LOOP = "the function runs its own event loop: make it `async def` and use await"
_ADVICE = {
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
    concurrency: int = 16,
    max_blocked_s: float = MAX_BLOCKED_S,
    more: Sequence[RewardSample] = (),
    on_step: Callable[[str], None] = lambda step: None,
    on_stuck: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Call a reward function in the ways that a run may call it, and report what goes wrong.

    All rounds run on an event loop outside of the main thread, as in a run. A function that scores by a rule, without
    a judge, is also called in processes, with about 160 answers for each row that is attacked.

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
        more: more samples, from which only right and wrong answers are made.
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
    calls = Calls(
        function,
        len(samples),
        manager=manager,
        reward_kwargs=reward_kwargs,
        router_address=router_address,
        concurrency=concurrency,
        options=options,
    )
    stuck_s = min(_STUCK_S, calls.function.timeout or _STUCK_S)
    checks = _Checks(calls, samples, [*samples, *more], concurrency, max_blocked_s, stuck_s, on_stuck)
    checks.target = resolve(function, reward_kwargs, of_lists=calls.is_batched)
    report = CheckReport([calls.callee()], calls.is_batched)
    rounds: list[tuple[str, Callable[[], Awaitable[list[Finding]]]]] = [
        ("the samples", checks.samples_score),
        ("the samples again", checks.scores_again),
        ("concurrent calls", checks.concurrent_calls),
        ("right and wrong answers", checks.known_answers),
        ("unusual texts", checks.unusual_texts),
    ]

    async def run_rounds() -> None:
        for step, find in rounds:
            on_step(step)
            report.findings += await find()
            if all(row.outcome == "failed" for row in checks.first):
                break  # all other checks would fail for the same reason

    try:
        await outside_the_main_thread(run_rounds())
    finally:
        # In a thread: closing waits until worker processes have ended.
        await asyncio.to_thread(calls.close)
    report.rows, report.attack = checks.first, checks.attack
    return report


@dataclass
class _Checks:
    calls: Calls
    samples: Sequence[RewardSample]
    attacked: Sequence[RewardSample]
    concurrency: int
    max_blocked_s: float
    stuck_s: float
    on_stuck: Callable[[str], None]
    first: list[CheckedRow] = field(default_factory=list)
    """The results of the first round."""
    deterministic: bool = True
    target: Any = None
    attack: AttackReport | None = None
    blocked: list[list[StepTimer]] = field(default_factory=list)
    """For each round: for how many seconds each call blocked the event loop."""

    @property
    def scores_by_rule(self) -> bool:
        """Whether the function compares an answer with the ground truth itself, without asking a judge."""
        calls, requires = self.calls, self.calls.requires
        return "ground_truth" in requires and not (
            calls.of_groups or {"reward_router_address", "response_ids"} & requires
        )

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
        """Attack the function with answers whose right verdict is known, in processes."""
        if not self.scores_by_rule:
            return []
        attacked = [one for one in self.attacked if not missing(one.ground_truth)]
        if not attacked:
            return [Finding("right and wrong answers", "skipped", "nothing attacked: no row has a ground truth")]
        rows = rows_of([(one.ground_truth, _question(one.prompt), one.solution_str) for one in attacked])
        try:
            scores = IsolatedScores(self.target, attacked, _ATTACK_S)
        except FunctionLoadError as error:
            return [Finding("right and wrong answers", "skipped", str(error))]
        try:
            self.attack = await Attack(rows, scores, scores.width).run()
            found = await self._elsewhere(scores)
        except WaitsForServiceError as error:
            return [Finding("right and wrong answers", "skipped", f"nothing attacked: {error}")]
        finally:
            await asyncio.to_thread(scores.close)
        return [*_attack_findings(self.attack, rows), *found]

    async def _elsewhere(self, scores: IsolatedScores) -> list[Finding]:
        """Check that calls where runs call, and in the main thread of another process, have the same results."""
        assert self.attack is not None
        if not self.deterministic or self.calls.in_processes or self.calls.is_batched:
            return []
        form = self.attack.forms[0] if self.attack.forms else "{}"
        # Without those that have no ground truth: a run does not call the function on them.
        first = [(one, row) for one, row in zip(self.samples, self.first, strict=True) if not missing(one.ground_truth)]
        samples = [one for one, _ in first]
        for sample in samples.copy():
            text = form.replace("{}", texts_of(sample.ground_truth)[0])
            samples.append(replace(sample, solution_str=text, is_truncated=None))
        here = [*(row for _, row in first), *await self.calls.run_each(samples[len(first) :], 1)]
        places = [*range(len(first))] * 2
        there = [(await scores(i, [one.solution_str], True))[0] for i, one in zip(places, samples, strict=False)]
        pairs = list(zip(samples, here, there, strict=False))
        changed = [
            (sample, row, other)
            for sample, row, other in pairs
            if other != NOT_CALLED and (row.score if row.outcome != "failed" else "") != _plain(other)
        ]
        if not changed:
            return [Finding("other places", "ok", f"{len(pairs)} calls have the same results in a worker process")]
        sample, row, other = changed[0]
        shown = f"scored {other:.6g}" if isinstance(other, float) else other or "unscored"
        text = (
            f"{len(changed)} of {len(pairs)} answers have other results in the main thread of a worker process; "
            f"{shorten(sample.solution_str, 60)}: {row.shown} where runs call, {shown} there"
        )
        if isinstance(other, str):
            return [Finding("other places", "note", text)]
        return [Finding("other places", "problem", f"{text}. Fix: {OUTSIDE_THE_MAIN_THREAD}")]

    async def unusual_texts(self) -> list[Finding]:
        text = self.samples[0].solution_str or "x"
        responses = {
            "an empty response": "",
            "a huge response": (text * (_HUGE_CHARACTERS // len(text) + 1))[:_HUGE_CHARACTERS],
            "a malformed response": _MALFORMED,
        }
        function, timeout = self.calls.function, self.calls.function.timeout
        function.timeout = min(timeout or _HUGE_TIMEOUT_S, _HUGE_TIMEOUT_S)
        found = []
        try:
            for name, response in responses.items():
                one = replace(self.samples[0], solution_str=response, uid=name)
                # A batch function gets this response together with normal ones, which must not fail because of it.
                row, *others = await self.calls.run([one, *self.samples[1:]] if self.calls.is_batched else [one])
                if row.outcome == "failed":
                    advice = "Policies generate such responses: return a score, or None for no score"
                    if "RequestError: " in row.error:
                        advice = "The service that the function asked is the cause, not this response"
                    if others and all(other.outcome == "failed" for other in others):
                        advice += f". The {len(others)} other samples of the call also failed"
                    found.append(Finding(name, "problem", f"{_explained(row.error)}\n{advice}"))
                else:
                    found.append(Finding(name, "ok", f"{row.shown}, in {duration(row.seconds)}"))
        finally:
            function.timeout = timeout
        return [*found, *await self._failed_requests()]

    async def _failed_requests(self) -> list[Finding]:
        """Check that a failed request of the function does not become a score."""
        if self.calls.in_processes:
            return []
        with failing_requests() as failed:
            row, *_ = await self.calls.run(self.samples if self.calls.is_batched else self.samples[:1])
        if not failed:
            return []
        if row.score is None:
            return [Finding("a failed request", "ok", f"{row.outcome}, when its connection was refused")]
        text = (
            f"{row.shown}, when its connection was refused: a run would train on this in an outage of the service. Let "
            "the error propagate, so that the call is repeated, or return None"
        )
        return [Finding("a failed request", "problem", text)]

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


def _question(prompt: Any) -> str:
    """Return the text of a prompt; of chat messages, the last one."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _plain(outcome: float | str | None) -> float | str | None:
    return "" if isinstance(outcome, str) else outcome


def _attack_findings(attack: AttackReport, rows: Sequence[AttackedRow]) -> list[Finding]:
    """Return what the attack found: what a policy is paid for first."""
    name = "right and wrong answers"
    anything = [kind for kind in attack.flagged(PAID) if not attack.forms]
    if anything:
        text = (
            f"right and wrong answers have the same score; {shorten(anything[0].smallest, 60)}: {anything[0].score:g}"
        )
        return [Finding("false positives", "problem", text)]
    if attack.note:
        return [Finding(name, "note", attack.note)]
    found = []
    if paid := attack.flagged(PAID):
        text = "wrong answers that need no reference are right, so a policy is paid for them:\n" + _listed(paid)
        found.append(Finding("false positives", "problem", text))
    if holes := attack.flagged(["knows"]):
        text = "wrong answers that contain the reference, or are near to it, are right:\n" + _listed(holes)
        found.append(Finding("holes of the rule", "note", text))
    if bonuses := attack.bonuses:
        shown = "\n".join(f"{one.name}: {one.bonus:.0%} for {shorten(one.bonus_for, 60)}" for one in bonuses[:_LINES])
        text = f"wrong answers that need no reference gain a part of the score:\n{shown}"
        found.append(Finding("paid style", "note", text))
    if attack.refused:
        shown = ", ".join(shorten(rows[index].reference, 40) for index in attack.refused[:4])
        text = f"{len(attack.refused)} of {attack.given} rows: the reference is refused in every form: {shown}"
        found.append(Finding("refused references", "problem", text))
    if refused := attack.flagged(["right", "form"]):
        found.append(Finding("refused answers", "note", "right answers are refused:\n" + _listed(refused)))
    if listed := attack.flagged(["contract"]):
        text = "accepted, and people disagree whether they are right:\n" + _listed(listed)
        found.append(Finding("open to dispute", "ok", text))
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
        kinds = ", ".join(f"{kind} ({count})" for kind, count in attack.not_built.items())
        text += f"; rows from which a kind cannot be made: {kinds}"
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
