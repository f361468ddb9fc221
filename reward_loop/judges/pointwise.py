"""Ready judges of single responses: `Equality`, `Panel`, `Cascade` and `Spot`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from reward_loop._util.text import listing
from reward_loop.client import Choice, Number, spot_check
from reward_loop.client.spot_checks import check_share
from reward_loop.errors import ConfigError
from reward_loop.judges.asker import Asker, prompt_of, reference_of
from reward_loop.judges.rubric import Rubric

__all__ = ["Cascade", "Equality", "Panel", "Spot"]

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
