"""`Spot`: a cheap model judges every response, and a strong one checks a random share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from reward_loop._util.text import listing
from reward_loop.client import spot_check
from reward_loop.client.spot import check_share
from reward_loop.errors import ConfigError
from reward_loop.judges.pointwise import Equality, Panel
from reward_loop.judges.rubric import Rubric

__all__ = ["Spot"]

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
            if ground_truth is None:
                raise ValueError("the row has no ground_truth, which the judge 'equality' compares the answer with")
            row["ground_truth"] = ground_truth
        judgement = await spot_check(self._cheap.compute_score(**row), self._strong.compute_score(**row), **self._check)
        return judgement.reward()
