"""Finds what a function accepts, refuses and crashes on, among answers whose right verdict is known.

First the form is searched in which the function accepts a reference. Then each row's answers (`attacks.KINDS`) are
scored in it. A wrong answer counts as accepted if its score is at least three quarters of the way from the score of a
wrong answer in the same form to that of the right one; where near answers are paid by their distance, only the full
score counts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from reward_loop.offline.attacks import CODE, FORMS, KINDS, PROSE, AttackedRow, Kind, changed, forms_of, texts_of

Outcome = float | str | None
"""The score of an answer; ``None`` if it is unscored; a text if the call failed, or `NOT_CALLED`."""
NOT_CALLED = "not called: the time was up"

Score = Callable[[int, Sequence[str]], Awaitable[list[Outcome]]]
"""Scores answers to the row with an index."""

Bounds = tuple[float, float]
"""The scores of the right answer, and of a wrong one in the same form."""

_NO_FORM = "no usual form of a reference scores more than a wrong answer. Give a file whose responses are right ones"
_TOO_SLOW = "the function is too slow"
_SEARCHED_ROWS = 3
_FULL_ROWS = 8
"""The rows of each type that are attacked with all answers in all forms; others with one answer of each fourth kind, in
turn, in the first form: more rows of the same type hardly find more."""
_MAX_FORMS = 3
_NEAR = ("near value", "factor of ten", "json value", "longer word", "part")
"""The kinds whose answers a function that pays by distance gives a part of the score."""
_OF_THE_FILE = ("other response", "prompt alone", "own response")
"""The kinds that need prompts or responses."""
_BONUS = 0.25


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


@dataclass(slots=True)
class AttackReport:
    """What was found."""

    types: dict[str, int] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)
    graded: bool = False
    """Whether near answers get a part of the score."""
    given: int = 0
    attacked: int = 0
    """Rows whose answers were all scored."""
    refused: list[int] = field(default_factory=list)
    """Indices of rows whose reference is refused in every form."""
    not_built: Counter[str] = field(default_factory=Counter)
    """Kinds that need a prompt or responses, which rows do not have -> number of such rows."""
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
class _Trial:
    """An answer of a kind to a row, in one form, and the scores of right and wrong answers in it."""

    kind: str
    row: int
    form: str
    answer: str
    outcome: Outcome
    bounds: Bounds

    @property
    def score(self) -> float:
        return self.outcome if isinstance(self.outcome, float) else 0.0

    @property
    def share(self) -> float:
        """The share of the way from the wrong answer's score to that of the right one."""
        right, wrong = self.bounds
        return (self.outcome - wrong) / (right - wrong) if isinstance(self.outcome, float) else -math.inf


class Attack:
    """Attacks a function with the kinds that fit its rows.

    Args:
        rows: the rows; see `attacks.rows_of`.
        score: calls the function. It returns `NOT_CALLED` for answers that it does not score any more.
    """

    def __init__(self, rows: Sequence[AttackedRow], score: Score) -> None:
        self._rows = rows
        self._score_answers = score
        self._trials: list[_Trial] = []
        self._ties: list[tuple[str, str, float]] = []
        """For each row whose right and wrong answers score the same in all forms: a kind, an answer, its score."""
        self._is_late = False
        self._report = AttackReport(dict(Counter(row.type for row in rows)), given=len(rows))

    async def run(self) -> AttackReport:
        """Attack, and return what was found."""
        started, report = time.perf_counter(), self._report
        await self._find_forms()
        for index in range(len(self._rows) if report.forms else 0):
            await self._attack_row(index)
        report.graded = any(0.15 < trial.share < 0.95 for trial in self._trials if trial.kind in _NEAR)
        report.kinds += [self._summary(kind) for kind in KINDS if any(one.kind == kind.name for one in self._trials)]
        report.seconds = time.perf_counter() - started
        return report

    async def _score(self, index: int, answers: Sequence[str]) -> list[Outcome]:
        outcomes = await self._score_answers(index, answers)
        self._is_late |= NOT_CALLED in outcomes
        self._report.calls += len(outcomes) - outcomes.count(NOT_CALLED)
        return outcomes

    async def _find_forms(self) -> None:
        votes: Counter[str] = Counter()
        searched = min(len(self._rows), _SEARCHED_ROWS)
        for index in range(searched):
            votes.update(row.form for row, _ in await self._search(index))
        order = sorted((form for form in votes if form in FORMS), key=lambda form: (-votes[form], FORMS.index(form)))
        marked, prose = [form for form in order if form not in PROSE], [form for form in order if form in PROSE]
        # A form within the first one, or around it, is read in the same way.
        others = [form for form in marked[1:] if not form.startswith("<think>") and marked[0][:6] not in form]
        own = sorted(votes, key=lambda form: (-votes[form], len(form)))  # the form of a response
        self._report.forms = [*marked[:1], *prose[:1], *others][:_MAX_FORMS] or own[:1]
        if not votes and len(self._ties) == searched:
            name, answer, score = self._ties[0]
            (kind,) = [kind for kind in KINDS if kind.name == name]
            tie = KindReport(name, kind.level, kind.rule, searched, searched, searched, smallest=answer, score=score)
            self._report.kinds.append(tie)
        elif not votes:
            self._report.note = f"nothing attacked: {_TOO_SLOW if self._is_late else _NO_FORM}"

    async def _search(self, index: int) -> list[tuple[AttackedRow, Bounds]]:
        """Return the row in the forms in which its reference scores best, and more than wrong answers."""
        row = self._rows[index]
        for text in dict.fromkeys([row.text] if row.type == "program" else texts_of(row.reference)):
            usual = (CODE, "{}") if row.type == "program" else (*FORMS, *forms_of(replace(row, text=text)))
            tried = [replace(row, text=text, form=form) for form in usual]
            controls = [answer for one in tried for answer in _controls(one)]
            empty, unknown, *scores = await self._score(index, ["", "?", *controls])
            threes = [scores[place : place + 3] for place in range(0, len(scores), 3)]
            found = [(one, bounds) for one, three in zip(tried, threes, strict=True) if (bounds := _bounds(three))]
            if found:
                best = max(right for _, (right, _) in found)
                least = best - 0.1 * abs(best - (empty if isinstance(empty, float) else 0.0))
                return [one for one in found if one[1][0] >= least]
            best = max((three[0] for three in threes if isinstance(three[0], float)), default=0.0)
            if best > 0 and empty == unknown and all(three == three[:1] * 3 for three in threes):
                marked = next(one for one, three in zip(tried, threes, strict=True) if three[0] == best)
                tie = ("empty", "", best) if empty == best else ("another answer", marked.put(row.other), best)
                self._ties.append(tie)
        return []

    async def _attack_row(self, index: int) -> None:
        row, usable = self._rows[index], list[tuple[AttackedRow, Bounds]]()
        is_full = sum(one.type == row.type for one in self._rows[:index]) < _FULL_ROWS
        # A program is read in the same way in all forms, and is slow to score.
        for form in self._report.forms if is_full and row.type != "program" else self._report.forms[:1]:
            tried = replace(row, form=form)
            scores = await self._score(index, _controls(tried))
            if NOT_CALLED in scores:
                return
            usable += [(tried, bounds)] if (bounds := _bounds(scores)) else []
        usable = usable or (await self._search(index))[:1]
        if not usable:
            self._report.refused.append(index)
            return
        trials, kinds = [], KINDS if is_full else KINDS[index % 4 :: 4]
        for tried, bounds in usable:
            built = [(kind, answer) for kind in kinds for answer in _chosen(kind, kind.build(tried), index, is_full)]
            outcomes = await self._score(index, [answer for _, answer in built])
            pairs = zip(built, outcomes, strict=True)
            trials += [_Trial(kind.name, index, tried.form, answer, one, bounds) for (kind, answer), one in pairs]
        needed = [kind for kind in kinds if kind.name in _OF_THE_FILE and row.type[0].upper() in kind.types]
        self._report.not_built.update(kind.name for kind in needed if not kind.build(row))
        self._report.attacked += all(trial.outcome != NOT_CALLED for trial in trials)
        self._trials += [trial for trial in trials if trial.outcome != NOT_CALLED]

    def _summary(self, kind: Kind) -> KindReport:
        report = KindReport(kind.name, kind.level, kind.rule)
        least = 1 - 1e-9 if self._report.graded else 0.75
        trials, flagged = [one for one in self._trials if one.kind == kind.name], list[_Trial]()
        for _, group in itertools.groupby(trials, key=lambda one: (one.row, one.form)):
            tried = list(group)
            accepted = [one for one in tried if one.share >= least]
            if kind.level in ("right", "form"):
                # Where the control is refused, the function expects another place for its answer.
                is_read = kind.level == "form" or tried[0] in accepted
                flagged += [one for one in tried if is_read and one not in accepted]
            elif not kind.needs_all or len(accepted) == len(tried) > 1:
                flagged += accepted
        rows = [one.row for one in trials]
        report.answers, report.rows = len(trials), len({*rows})
        report.flagged = len({one.row for one in flagged})
        for one in sorted(flagged, key=lambda one: len(one.answer))[:1]:
            report.smallest, report.score = one.answer, one.score
        best = [max((one for one in trials if one.row == row), key=lambda one: one.score) for row in {*rows}]
        report.earned, report.right = sum(one.score for one in best), sum(one.bounds[0] for one in best)
        if kind.level == "free" and not self._report.graded:
            gained = [(one.share, one.answer) for one in trials if 0 < one.share < least]
            report.bonus, report.bonus_for = max(gained, default=(0.0, ""))
        crashes = [one for one in trials if isinstance(one.outcome, str)]
        report.crashed = len(crashes)
        for one in sorted(crashes, key=lambda one: len(one.answer))[:1]:
            report.crash, report.error = one.answer, str(one.outcome)
        return report


def _chosen(kind: Kind, answers: Sequence[str], index: int, is_full: bool) -> Sequence[str]:
    are_all = is_full or kind.needs_all or kind.level == "right" or not answers
    return answers if are_all else [answers[index // 4 % len(answers)]]


def _controls(row: AttackedRow) -> list[str]:
    """Return the right answer in the row's form, and two wrong ones."""
    return [row.put(row.text), row.put(row.other), row.put(changed(row.text))]


def _bounds(scores: Sequence[Outcome]) -> Bounds | None:
    """Return the scores of a right and of wrong answers, if the function distinguishes them."""
    right, *others = scores
    if not isinstance(right, float):
        return None
    # Only the right one may have a score: the others are unscored, or fail.
    wrong = min((score for score in others if isinstance(score, float)), default=right - 1.0)
    return (right, wrong) if right > wrong else None
