"""Finds what a function accepts, refuses and crashes on, among answers whose right verdict is known.

First the form is searched in which the function accepts a reference. Then each row's answers (`attacks.KINDS`) are
scored in it. A wrong answer counts as accepted if its score is at least three quarters of the way from the score of a
wrong answer in the same form to that of the right one; where near answers are paid by their distance, only the full
score counts.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reward_loop.errors import RewardCrashedError
from reward_loop.offline.attacked_rows import FORMS, PROSE, AttackedRow, changed, forms_of, texts_of
from reward_loop.offline.attacks import KINDS, Kind
from reward_loop.processes.child import callable_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.scoring import normalise
from reward_loop.scoring.load import file_modules
from reward_loop.scoring.signature import Target
from reward_loop.types import RewardSample

Outcome = float | str | None
"""The score of an answer; ``None`` if it is unscored; a text if the call failed, or `NOT_CALLED`."""
NOT_CALLED = "not called: the time was up"

Score = Callable[[int, Sequence[str], bool], Awaitable[list[Outcome]]]
"""Scores answers to the row with an index; the last argument is whether an answer may change its process."""

_SEARCHED_ROWS = 3
_MORE_ROWS = 8
"""The number of rows that are attacked in all forms; the others are attacked in the first one."""
_MAX_FORMS = 3
_CODE = "```python\n{}\n```"
_BONUS = 0.25
_CHUNK_S = 0.5
_CHUNK_TIMEOUT_S = 10.0


@dataclass(slots=True)
class KindReport:
    """What the function did with the answers of one kind."""

    name: str
    level: str
    rule: str
    rows: int = 0
    """Rows for which the kind was built and scored."""
    flagged: int = 0
    """Rows where a wrong answer was accepted, or a right one refused."""
    answers: int = 0
    crashed: int = 0
    smallest: str = ""
    """The shortest answer that was flagged."""
    score: float = 0.0
    """Its score."""
    earned: float = 0.0
    """The sum, over the rows, of the best score of such an answer."""
    right: float = 0.0
    """The sum, over the same rows, of the score of the right answer."""
    bonus: float = 0.0
    """The largest share of the way to the right answer's score that a wrong answer gained, if it was not accepted."""
    bonus_for: str = ""
    error: str = ""
    """The error of the shortest answer that crashed the function."""
    crash: str = ""

    def flag(self, answer: str, score: Outcome) -> None:
        """Keep the shortest flagged answer."""
        if not self.flagged or len(answer) < len(self.smallest):
            self.smallest, self.score = answer, score if isinstance(score, float) else 0.0


@dataclass(slots=True)
class AttackReport:
    """What was found."""

    types: dict[str, int] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)
    graded: bool = False
    """Whether near answers get a part of the score."""
    given: int = 0
    attacked: int = 0
    """Rows that were attacked with all kinds."""
    refused: list[int] = field(default_factory=list)
    """Indices of rows whose reference is refused in every form."""
    not_built: dict[str, int] = field(default_factory=dict)
    """Kinds that apply to a row, but cannot be made from it -> number of such rows."""
    kinds: list[KindReport] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0
    note: str = ""
    """Why nothing was attacked."""

    def flagged(self, levels: Iterable[str]) -> list[KindReport]:
        """Return the flagged kinds of these levels, level by level; within one, those with most rows first."""
        found = [kind for kind in self.kinds if kind.flagged]
        return [kind for level in levels for kind in sorted(found, key=lambda one: -one.flagged) if kind.level == level]

    @property
    def bonuses(self) -> list[KindReport]:
        """The kinds of wrong answers without the reference that gain a part of the score."""
        return [kind for kind in self.kinds if kind.level == "free" and kind.bonus >= _BONUS and not kind.flagged]


@dataclass(frozen=True, slots=True)
class _Bounds:
    right: float
    wrong: float

    def reached(self, score: Outcome) -> float:
        """Return the share of the way from wrong to right."""
        return (score - self.wrong) / (self.right - self.wrong) if isinstance(score, float) else -math.inf


class Attack:
    """Attacks a function with the kinds that fit its rows.

    Args:
        rows: the rows; see `attacks.rows_of`.
        score: calls the function. It returns `NOT_CALLED` for answers that it does not score any more.
        width: the number of rows that are scored at the same time.
    """

    def __init__(self, rows: Sequence[AttackedRow], score: Score, width: int = 2) -> None:
        self._rows = rows
        self._score_answers = score
        self._width = width
        self._reports = {kind.name: KindReport(kind.name, kind.level, kind.rule) for kind in KINDS}
        self._not_built: Counter[str] = Counter()
        self._report = AttackReport(dict(Counter(row.type for row in rows)), given=len(rows))
        # Only data with reasoning says what an answer within it is worth.
        self._has_reasoning = any("</think>" in row.response for row in rows)

    async def run(self) -> AttackReport:
        """Attack, and return what was found."""
        started, report = time.perf_counter(), self._report
        await self._find_forms()
        if report.forms:
            await self._find_grades()
            for first in range(0, len(self._rows), self._width):
                some = range(first, min(first + self._width, len(self._rows)))
                await asyncio.gather(*map(self._attack_row, some))
        elif not any(kind.flagged for kind in self._reports.values()):
            report.note = (
                "nothing attacked: no usual form of a reference scores more than a wrong answer. Give a file whose "
                "responses are right ones"
            )
        report.kinds = [kind for kind in self._reports.values() if kind.rows]
        report.not_built = dict(+self._not_built)
        report.seconds = time.perf_counter() - started
        return report

    async def _score(self, index: int, answers: Sequence[str], alone: bool = False) -> list[Outcome]:
        outcomes = await self._score_answers(index, answers, alone) if answers else []
        self._report.calls += len(outcomes) - outcomes.count(NOT_CALLED)
        return outcomes

    async def _find_forms(self) -> None:
        votes: Counter[str] = Counter()
        anything: Counter[str] = Counter()
        searched = min(len(self._rows), _SEARCHED_ROWS)
        for index in range(searched):
            found = await self._search(index)
            votes.update(row.form for row, _ in found)
            if not found and (accepted := await self._accepts_anything(index)):
                anything[accepted] += 1
        for name, count in anything.items():
            if count == searched:
                kind = self._reports[name]
                kind.rows = kind.flagged = searched
        order = sorted((form for form in votes if form in FORMS), key=lambda form: (-votes[form], FORMS.index(form)))
        marked, prose = [form for form in order if form not in PROSE], [form for form in order if form in PROSE]
        # A form within the first one, or around it, is read in the same way.
        others = [form for form in marked[1:] if not form.startswith("<think>") and marked[0][:6] not in form]
        self._report.forms = [*marked[:1], *prose[:1], *others][:_MAX_FORMS]
        if not order and votes:
            self._report.forms = [min(votes, key=lambda form: (-votes[form], len(form)))]

    async def _search(self, index: int) -> list[tuple[AttackedRow, _Bounds]]:
        """Return the forms in which the reference scores best, and more than a wrong answer."""
        row = self._rows[index]
        for text in dict.fromkeys([row.text] if row.type == "program" else texts_of(row.reference)):
            usual = (_CODE, "{}") if row.type == "program" else (*FORMS, *forms_of(replace(row, text=text)))
            tried = [replace(row, text=text, form=form) for form in usual]
            nothing, *rights = await self._score(index, ["", *(one.put(text) for one in tried)])
            known = [(score, one) for score, one in zip(rights, tried, strict=True) if isinstance(score, float)]
            best = max((score for score, _ in known), default=0.0)
            least = best - 0.1 * abs(best - (nothing if isinstance(nothing, float) else 0.0))
            near = [one for score, one in known if score >= least]
            found = []
            for one in near:
                bounds = await self._bounds(index, one)
                found += [(one, bounds)] if bounds else []
            if found:
                return found
        return []

    async def _bounds(self, index: int, row: AttackedRow) -> _Bounds | None:
        return _bounds_of(await self._score(index, _controls(row)))

    async def _accepts_anything(self, index: int) -> str:
        """Return the kind of answers that are right, if every answer is, or every one with a marker; else nothing."""
        row = self._rows[index]
        forms = [replace(row, form=form) for form in FORMS]
        empty, unknown, *scores = await self._score(
            index, ["", "?", *(one.put(text) for one in forms for text in (row.text, row.other, changed(row.text)))]
        )
        threes = [scores[place : place + 3] for place in range(0, len(scores), 3)]
        tied = [score for score, *others in threes if isinstance(score, float) and others == [score, score]]
        if not tied or any(score not in tied for score in scores[::3]):
            return ""
        best = max(tied)
        if empty == unknown == best and min(tied) == best > 0:
            self._reports["empty"].flag("", best)
            return "empty"
        if isinstance(empty, float) and empty < best and empty == unknown:
            answer = forms[[three[0] for three in threes].index(best)].put(row.other)
            self._reports["another answer"].flag(answer, best)
            return "another answer"
        return ""

    async def _find_grades(self) -> None:
        names = ("off by one", "near value", "factor of ten", "json value", "longer word", "letters", "part")
        shares: list[float] = []
        for index, row in enumerate(self._rows[:_SEARCHED_ROWS]):
            tried = replace(row, form=self._report.forms[0])
            near = [answer for kind in KINDS if kind.name in names for answer in _built(kind, tried)]
            scores = await self._score(index, [*_controls(tried), *near])
            if bounds := _bounds_of(scores[:3]):
                shares += map(bounds.reached, scores[3:])
        self._report.graded = any(0.15 < share < 0.95 for share in shares)

    async def _attack_row(self, index: int) -> None:
        forms = self._report.forms if index < _MORE_ROWS else self._report.forms[:1]
        row, usable = self._rows[index], []
        for form in forms:
            tried = replace(row, form=form)
            scores = await self._score(index, _controls(tried))
            if NOT_CALLED in scores:
                return
            if bounds := _bounds_of(scores):
                usable.append((tried, bounds))
        if not usable:
            usable = (await self._search(index))[:1]
        if not usable:
            self._report.refused.append(index)
            return
        flagged: set[str] = set()
        is_complete = True
        best: dict[str, float] = {}
        for tried, bounds in usable:
            built = [(kind, _built(kind, tried)) for kind in KINDS if row.type[0].upper() in kind.types]
            for alone in (False, True):
                kinds = [(kind, answers) for kind, answers in built if kind.alone is alone]
                outcomes = iter(await self._score(index, [one for _, answers in kinds for one in answers], alone))
                for kind, answers in kinds:
                    pairs = [(answer, next(outcomes)) for answer in answers]
                    is_complete &= all(outcome != NOT_CALLED for _, outcome in pairs)
                    if self._add(kind, pairs, bounds):
                        flagged.add(kind.name)
                    top = max((score for _, score in pairs if isinstance(score, float)), default=-math.inf)
                    best[kind.name] = max(best.get(kind.name, -math.inf), top)
        right = max(bounds.right for _, bounds in usable)
        for kind, answers in built:
            if not answers:
                # Other kinds do not apply to the reference: it has no unit, for instance.
                self._not_built[kind.name] += kind.answers is not None
            elif best[kind.name] > -math.inf:
                report = self._reports[kind.name]
                report.rows += 1
                report.flagged += kind.name in flagged
                report.earned += best[kind.name]
                report.right += right
        self._report.attacked += is_complete

    def _add(self, kind: Kind, pairs: Sequence[tuple[str, Outcome]], bounds: _Bounds) -> bool:
        """Add the outcomes of a kind's answers in one form; return whether the kind is flagged."""
        report = self._reports[kind.name]
        pairs = [pair for pair in pairs if pair[1] != NOT_CALLED]
        report.answers += len(pairs)
        least = 1 - 1e-9 if self._report.graded else 0.75
        accepted = [pair for pair in pairs if bounds.reached(pair[1]) >= least]
        crashes = [pair for pair in pairs if isinstance(pair[1], str)]
        for answer, error in crashes:
            report.crashed += 1
            if not report.crash or len(answer) < len(report.crash):
                report.crash, report.error = answer, str(error)
        if kind.level in ("right", "form"):
            refused = [pair for pair in pairs if pair not in accepted]
            # Where the control is refused, the function expects another place for its answer.
            found = [] if kind.level == "right" and (not pairs or pairs[0] in refused) else refused
        elif kind.needs_all:
            found = accepted[:1] if len(accepted) == len(pairs) > 1 else []
        else:
            found = accepted
            for answer, score in pairs if kind.level == "free" and not self._report.graded else ():
                if report.bonus < bounds.reached(score) < least:
                    report.bonus, report.bonus_for = bounds.reached(score), answer
        if kind.name == "reasoning then none" and not self._has_reasoning:
            report.level = "contract"
        for answer, score in found:
            report.flag(answer, score)
        return bool(found)


def _controls(row: AttackedRow) -> list[str]:
    """Return the right answer in the row's form, and two wrong ones."""
    return [row.put(row.text), row.put(row.other), row.put(changed(row.text))]


def _bounds_of(scores: Sequence[Outcome]) -> _Bounds | None:
    """Return the scores of a right and of wrong answers, if the function distinguishes them."""
    right, *others = scores
    if not isinstance(right, float):
        return None
    wrongs = [score for score in others if isinstance(score, float)]
    # Only the right one may have a score: the others are unscored, or fail.
    wrong = min(wrongs, default=right - 1.0)
    return _Bounds(right, wrong) if right > wrong else None


def _built(kind: Kind, row: AttackedRow) -> list[str]:
    return kind.build(row) if row.type[0].upper() in kind.types else []


class IsolatedScores:
    """Scores answers in the main thread of other processes, so that an answer can end or change only its own.

    Args:
        target: the function.
        samples: the rows, whose responses are replaced by answers.
        seconds: the time after which answers are not scored any more.

    Raises:
        FunctionLoadError: the function cannot run in another process.
    """

    def __init__(self, target: Target, samples: Sequence[RewardSample], seconds: float) -> None:
        function = {"function": target.origin, "constructor": target.constructor}
        self._processes = WorkerProcesses(_Several, function, name=target.name, files=file_modules())
        self.width = self._processes.max_processes
        self._target = target
        self._samples = samples
        self._mean_s = 0.01
        self._seconds = seconds
        self._end = math.inf

    async def __call__(self, index: int, answers: Sequence[str], alone: bool) -> list[Outcome]:
        """Score answers to one row.

        Raises:
            WaitsForServiceError: the function is async, and waits.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(answers):
            size = 1 if alone else max(1, min(256, int(_CHUNK_S / self._mean_s)))
            outcomes += await self._score(index, answers[len(outcomes) : len(outcomes) + size])
        return outcomes

    def close(self) -> None:
        """Stop the processes."""
        self._processes.close()

    async def _score(self, index: int, answers: Sequence[str]) -> list[Outcome]:
        if time.monotonic() > self._end:
            return [NOT_CALLED] * len(answers)
        calls = [self._arguments(index, answer) for answer in answers]
        run = self._processes.run
        try:
            called = await run({"calls": calls}, key=str(index), timeout=_CHUNK_TIMEOUT_S, begin=self._start_clock)
        except (RewardCrashedError, TimeoutError) as error:
            if len(answers) == 1:
                return [f"{type(error).__name__}: {error}"]
            half = len(answers) // 2
            return [*await self._score(index, answers[:half]), *await self._score(index, answers[half:])]
        if isinstance(called.exception, WaitsForServiceError):
            raise called.exception
        if (problem := called.exception or called.error) is not None:
            return [f"{type(problem).__name__}: {problem}"] * len(answers)
        # The mean of the last calls: the first ones fill caches.
        self._mean_s = 0.5 * self._mean_s + 0.5 * max(1e-5, called.work_s / len(answers))
        return list(called.value)

    def _arguments(self, index: int, answer: str) -> dict[str, Any]:
        sample = self._samples[index]
        cut_off = None if sample.is_truncated is None else False
        sample = replace(sample, solution_str=answer, group=None, turns=None, response_ids=None, is_truncated=cut_off)
        if self._target.lists is not None:
            return self._target.list_arguments([sample], None, None, 1)
        return self._target.arguments(sample, None, None, 1)

    def _start_clock(self) -> None:
        # Not before the first call: importing the function's module may take longer than all calls.
        self._end = min(self._end, time.monotonic() + self._seconds)


class WaitsForServiceError(Exception):
    """The function awaits something, such as a judge: it is not a rule."""


class _Several:
    """Calls a function several times, in a process of its own."""

    def __init__(self, function: Any, constructor: Mapping[str, Any]) -> None:
        self._call = callable_of(function(**constructor) if inspect.isclass(function) else function)

    def __call__(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        return [outcome_of(self._call, arguments) for arguments in calls]


def outcome_of(call: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Call a function, and return the outcome.

    Raises:
        WaitsForServiceError: it is async, and waits.
    """
    try:
        value = call(**arguments)
        if inspect.iscoroutine(value):
            value = _result_of(value)
        if isinstance(value, list):  # of a batch function, which was called with one sample
            (value,) = value
        score, _ = normalise(value)
    except WaitsForServiceError:
        raise
    except BaseException as error:  # answers that a function evaluates may raise anything
        return f"{type(error).__name__}: {error}"[:300]
    return None if score is None else float(score)


def _result_of(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()
    raise WaitsForServiceError("it is async and waits for something, such as a judge")
