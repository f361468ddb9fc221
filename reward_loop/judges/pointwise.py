"""Ready judges of single responses: `Equality`, `Panel`, `Rubric`, `Cascade` and `Spot`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reward_loop._util.json import encode
from reward_loop._util.text import listing, shorten
from reward_loop.client import Choice, Number, Ratings, panel, spot_check
from reward_loop.client.spot_checks import check_share
from reward_loop.errors import ConfigError
from reward_loop.judges.asker import Asker, field_of, prompt_of, reference_of

logger = logging.getLogger(__name__)

_SAME = Choice({"same": 1.0, "different": 0.0})
_UNSURE = Choice({"same": 1.0, "different": 0.0, "unsure": 0.5})


class Equality:
    """Compares the final answer with the reference, for answers with many correct spellings; the score is 0 or 1."""

    def __init__(self, *, prompt: str | None = None, tail: int = 2000, **options: Any) -> None:
        """Create the judge.

        Args:
            prompt: the template, with the fields ``question``, ``reference`` and ``answer``; it must ask for
                ``Verdict: same`` or ``Verdict: different``.
            tail: the characters at the end of the response that the judge reads: the final answer is there.
            options: see `Asker`; ``combine`` is ``majority`` by default.

        Raises:
            ConfigError: an option is invalid.
        """
        self._tail = tail
        self._asker = Asker(prompt or prompt_of("equality"), _SAME, **{"combine": "majority", **options})

    async def compute_score(
        self,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        reward_router_address: str | None = None,
    ) -> dict[str, Any]:
        """Return 1 for an answer with the meaning of the reference, otherwise 0, also as ``acc``."""
        judgement = await self._asker.ask(
            reward_router_address,
            question=self._asker.question_of(extra_info),
            reference=reference_of(ground_truth),
            answer=solution_str[-self._tail :],
        )
        return judgement.reward(acc=judgement.score)


class Panel:
    """Rates how helpful a response is, by several judges; the score is the mean of their ratings, from 0 to 1."""

    def __init__(
        self, judges: Sequence[str | Mapping[str, Any]] = (), *, prompt: str | None = None, **options: Any
    ) -> None:
        """Create the judges.

        Args:
            judges: the models, or the options of each judge: see `Asker`.
            prompt: the template, with the fields ``question`` and ``answer``; it must ask for ``Score: N``, from 1 to
                10.
            options: see `Asker`.

        Raises:
            ConfigError: an option is invalid.
        """
        self._asker = Asker(prompt or prompt_of("helpfulness"), Number(1, 10, scaled=True), judges=judges, **options)

    async def compute_score(
        self, solution_str: str, extra_info: dict[str, Any], reward_router_address: str | None = None
    ) -> dict[str, Any]:
        """Return the score, the rating of each judge by its name, and their standard deviation as ``disagreement``."""
        judgement = await self._asker.ask(
            reward_router_address,
            question=self._asker.question_of(extra_info),
            answer=solution_str,
        )
        return judgement.reward()


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
            enforce: restrict the reply to JSON (see `Json`), so without an explanation. Not with `separate`.
            prompt: the template, with the fields ``question``, ``answer``, and ``criteria`` and ``form``, or with
                `separate` ``criterion``; also ``low`` and ``high``.
            options: see `Asker`.

        Raises:
            ConfigError: an option is invalid.
            ValueError: the criteria are invalid.
        """
        if separate and enforce:
            raise ConfigError("enforce has no effect with separate: leave one of them out")
        self._field = criteria if isinstance(criteria, str) and not criteria.lstrip().startswith("[") else None
        self._criteria = None if self._field is not None else _read_criteria(criteria)
        self._separate, self._low, self._high, self._enforce = separate, low, high, enforce
        # Without `separate`, a placeholder: the criteria of each row give its verdict.
        verdict = Number(low, high, scaled=True) if separate else Ratings({"criterion": 1.0}, low, high)
        self._asker = Asker(prompt or prompt_of("criterion" if separate else "rubric"), verdict, **options)

    async def compute_score(
        self, solution_str: str, extra_info: dict[str, Any], reward_router_address: str | None = None
    ) -> dict[str, Any]:
        """Return the score, and the rating of each criterion, from 0 to 1, by its name."""
        criteria = self._criteria or _read_criteria(field_of(extra_info, self._field or "", "criteria"))
        question = self._asker.question_of(extra_info)
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
            form = "{" + ", ".join(f"{encode(one.name).decode()}: N" for one in criteria) + "}"
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


class Cascade:
    """Compares the final answer with the reference by a rule, a small judge, and a large judge, until one decides."""

    def __init__(
        self,
        large: Mapping[str, Any],
        *,
        prompt: str | None = None,
        small_prompt: str | None = None,
        tail: int = 2000,
        spot: float | None = None,
        seed: int = 0,
        allow_small_share: bool = False,
        **options: Any,
    ) -> None:
        """Create the judges.

        Args:
            large: the options of the large judge, which replace `options`: usually ``address``, ``model``,
                ``api_key_env`` and ``limit``.
            prompt: the template of the large judge, as that of `Equality`.
            small_prompt: the template of the small judge, which may also reply ``Verdict: unsure``.
            tail: the characters at the end of the response that the judges read.
            spot: the share of the small judge's verdicts that the large judge checks: see `spot_check`. Without it, a
                policy in training learns answers about which the small judge is sure and wrong.
            seed, allow_small_share: see `spot_check`.
            options: options of the small judge: see `Asker`.

        Raises:
            ConfigError: an option is invalid.
        """
        self._tail = tail
        self._judges = (
            Asker(small_prompt or prompt_of("unsure"), _UNSURE, **options),
            Asker(prompt or prompt_of("equality"), _SAME, **{**options, **large}),
        )
        self._spot: dict[str, Any] | None = None
        if spot is None:
            logger.warning(
                "judge:cascade asks the large model only where the small one is unsure. As the reward of a training, "
                "such a choice let a policy learn answers about which the cheap judge was sure and wrong: with 20 % of "
                "strong calls, 84 % of its answers were right and 14 % wrong and rewarded; with as many random checks "
                "93 % and 5 % (docs/judges.md). Set spot=0.2 to check the verdicts of the small model. Scoring "
                "stored answers does not need it."
            )
        else:
            check_share(spot, allow_small_share)
            self._spot = {"share": spot, "seed": seed, "allow_small_share": allow_small_share}

    async def compute_score(
        self,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any],
        reward_router_address: str | None = None,
    ) -> dict[str, Any]:
        """Return 1 for a correct answer and 0 for an incorrect one; ``judged_by`` names the part that decided."""
        reference = reference_of(ground_truth)
        lines = solution_str.strip().splitlines() or [""]
        if lines[-1].strip() == str(reference).strip():
            return {"score": 1.0, "judged_by": "rule"}
        small, large = (
            asker.ask(
                reward_router_address,
                question=asker.question_of(extra_info),
                reference=reference,
                answer=solution_str[-self._tail :],
            )
            for asker in self._judges
        )
        try:
            judgement = await small
            if judgement.score not in (0.0, 1.0):
                return (await large).reward(judged_by="large")
            if self._spot is None:
                return judgement.reward(judged_by="small")
            judgement = await spot_check(judgement, large, **self._spot)
            return judgement.reward(judged_by="large" if "strong" in judgement.components else "small")
        finally:
            # If the small judge decides: otherwise Python warns of a coroutine that was never awaited.
            large.close()


_JUDGES: Mapping[str, Any] = {"equality": Equality, "panel": Panel, "rubric": Rubric}


class Spot:
    """Scores by one ready judge with two models: a cheap one for every response, a strong one for a random share."""

    def __init__(
        self,
        strong: Mapping[str, Any],
        *,
        judge: Literal["equality", "panel", "rubric"] = "equality",
        share: float = 0.2,
        seed: int = 0,
        accept: float = 0.5,
        allow_small_share: bool = False,
        **options: Any,
    ) -> None:
        """Create both judges.

        Args:
            strong: the options of the strong judge, which replace `options`: usually ``address``, ``model``,
                ``api_key_env`` and ``limit``.
            judge: the ready judge: `Equality`, `Panel` or `Rubric`.
            share, seed, accept, allow_small_share: see `spot_check`.
            options: the options of the ready judge, with the cheap model.

        Raises:
            ConfigError: an option is invalid.
        """
        if judge not in _JUDGES:
            raise ConfigError(f"judge={judge!r}: expected one of {listing(_JUDGES)}")
        self._takes_reference = judge == "equality"
        self._cheap, self._strong = _JUDGES[judge](**options), _JUDGES[judge](**{**options, **strong})
        self._check: dict[str, Any] = {
            "share": share,
            "seed": seed,
            "accept": accept,
            "allow_small_share": allow_small_share,
        }
        check_share(share, allow_small_share)

    async def compute_score(
        self,
        solution_str: str,
        extra_info: dict[str, Any],
        ground_truth: Any = None,
        reward_router_address: str | None = None,
    ) -> dict[str, Any]:
        """Return the score with its components; see `spot_check`.

        Raises:
            ValueError: the row has no reference, and the judge compares with it.
        """
        row = {"solution_str": solution_str, "extra_info": extra_info, "reward_router_address": reward_router_address}
        if self._takes_reference:
            row["ground_truth"] = reference_of(ground_truth)
        judgement = await spot_check(self._cheap.compute_score(**row), self._strong.compute_score(**row), **self._check)
        return judgement.reward()
