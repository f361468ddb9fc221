"""Ready judges of single responses: `Equality` and `Rubric`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reward_loop._util.json import encode
from reward_loop._util.text import shorten
from reward_loop.client import Choice, Number, Ratings, panel
from reward_loop.errors import ConfigError
from reward_loop.judges.asker import Asker, field_of, prompt_of

_MARKER = "<verdict>"
"""No natural phrase: a reply that only talks of a verdict does not contain it."""


class Equality:
    """Compares the final answer with the reference, for answers with many correct spellings; the score is 0 or 1."""

    def __init__(self, *, prompt: str | None = None, tail: int = 2000, enforce: bool = False, **options: Any) -> None:
        """Create the judge.

        Args:
            prompt: the template, with the fields ``question``, ``reference`` and ``answer``; it must ask for
                ``<verdict>same</verdict>`` or ``<verdict>different</verdict>``.
            tail: the characters at the end of the response that the judge reads: the final answer is there.
            enforce: make the server write JSON: see `Choice`.
            options: see `Asker`; ``combine`` is ``majority`` by default.

        Raises:
            ConfigError: an option is invalid.
        """
        self._tail = tail
        same = Choice({"same": 1.0, "different": 0.0}, after=_MARKER, enforce=enforce)
        self._asker = Asker(prompt or prompt_of("equality"), same, **{"combine": "majority", **options})

    async def compute_score(
        self,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        reward_router_address: str | None = None,
    ) -> dict[str, Any]:
        """Return 1 for an answer with the meaning of the reference, otherwise 0, also as ``acc``."""
        if ground_truth is None:  # the answer would be compared with the text "None"
            raise ValueError(
                "the row has no ground_truth, which the judge compares the answer with: it is missing or null"
            )
        judgement = await self._asker.ask(
            reward_router_address,
            question=field_of(extra_info, self._asker.question, "question"),
            reference=ground_truth,
            answer=solution_str[-self._tail :],
        )
        return judgement.reward(acc=judgement.score)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of a rubric."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # a key such as `points` is not ignored

    text: str
    """The criterion in words."""
    name: str = ""
    """Its name in the logs; by default ``criterion_1`` and so on."""
    weight: float = 1.0
    """Its weight in the score; negative for a fault."""


_CRITERIA = TypeAdapter(list[str | Criterion])


class Rubric:
    """Rates a response by criteria; the score is the weighted sum of the ratings, from 0 to 1."""

    def __init__(
        self,
        criteria: str | Sequence[Any] = "criteria",
        *,
        separate: bool = False,
        low: int = 1,
        high: int = 10,
        enforce: bool = False,
        prompt: str | None = None,
        **options: Any,
    ) -> None:
        """Create the judge.

        Args:
            criteria: the field of ``extra_info`` with the criteria of each row, or the criteria of all rows: a list,
                each item a text or ``{"text": ..., "name": ..., "weight": ...}``, or such a list as JSON.
            separate: send one request for each criterion, so that ratings do not influence each other. Otherwise one
                request has all criteria.
            low: the lowest rating.
            high: the highest rating; ``low=0, high=1`` for yes or no.
            enforce: make the server write JSON: see `Json`.
            prompt: the template, with the fields ``question``, ``answer``, and ``criteria`` and ``form``, or with
                `separate` ``criterion``; also ``low`` and ``high``.
            options: see `Asker`.

        Raises:
            ConfigError: an option is invalid.
            ValueError: the criteria are invalid.
        """
        self._field = criteria if isinstance(criteria, str) and not criteria.lstrip().startswith("[") else None
        self._criteria = None if self._field is not None else _read_criteria(criteria)
        self._separate, self._low, self._high, self._enforce = separate, low, high, enforce
        # Without `separate`, a placeholder: the criteria of each row give its verdict.
        number = Number(low, high, after=_MARKER, scaled=True, enforce=enforce)
        verdict = number if separate else Ratings({"criterion": 1.0}, low, high)
        self._asker = Asker(prompt or prompt_of("criterion" if separate else "rubric"), verdict, **options)

    async def compute_score(
        self, solution_str: str, extra_info: dict[str, Any], reward_router_address: str | None = None
    ) -> dict[str, Any]:
        """Return the score, and the rating of each criterion, from 0 to 1, by its name."""
        criteria = self._criteria or _read_criteria(field_of(extra_info, self._field or "", "criteria"))
        question = field_of(extra_info, self._asker.question, "question")
        weights = {one.name: one.weight for one in criteria}
        try:
            ratings = Ratings(weights, self._low, self._high, enforce=self._enforce)
        except ConfigError as error:  # an error of the row, which must not stop the run
            raise ValueError(str(error)) from None

        fields = {"question": question, "answer": solution_str, "low": self._low, "high": self._high}
        if self._separate:
            asked = {one.name: self._asker.ask(reward_router_address, **fields, criterion=one.text) for one in criteria}
            judgement = await panel(asked, quorum=len(asked), combine=ratings.weigh)
        else:
            listed = "\n".join(f"- {one.name}: {one.text}" for one in criteria)
            # A key twice is no verdict.
            reason = "explanation" if any(one.name.strip().lower() == "reason" for one in criteria) else "reason"
            parts = [f'"{reason}": "..."', *(f"{encode(one.name).decode()}: N" for one in criteria)]
            form = "{" + ", ".join(parts) + "}"
            judgement = await self._asker.ask(reward_router_address, ratings, **fields, criteria=listed, form=form)
        return judgement.reward()


def _read_criteria(given: Any) -> list[Criterion]:
    """Return the criteria, each with a name.

    Raises:
        ValueError: `given` is not a list of criteria, or two have the same name.
    """
    plain = given.tolist() if hasattr(given, "tolist") else given  # numpy, from a parquet file
    if isinstance(plain, list):  # parquet has None for keys that only other criteria have
        plain = [
            {key: value for key, value in one.items() if value is not None} if isinstance(one, dict) else one
            for one in plain
        ]
    try:
        found = _CRITERIA.validate_json(plain) if isinstance(plain, str) else _CRITERIA.validate_python(plain)
    except ValidationError:
        form = "a list, each item a text or {text: ..., name: ..., weight: ...}"
        raise ValueError(f"criteria: expected {form}; got {shorten(given)}") from None
    items = [Criterion(one) if isinstance(one, str) else one for one in found]
    named = [Criterion(one.text, one.name or f"criterion_{i}", one.weight) for i, one in enumerate(items, 1)]
    if not named or len({one.name for one in named}) < len(named):
        raise ValueError(f"criteria: {shorten(given)} must have at least one criterion, each with another name")
    return named
