"""`Pairwise`: compares the responses of a group."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from reward_loop.client import Choice, Order
from reward_loop.errors import ConfigError
from reward_loop.judges.asker import Asker, prompt_of
from reward_loop.scoring.tournament import compare_all, order_flips, ranking, win_rates

_BETTER = Choice({"A": 1.0, "B": 0.0, "tie": 0.5}, after="[[")


class Pairwise:
    """Compares the responses of a group with each other; the score is the share of wins, from 0 to 1.

    Use it with the manager `group`, which calls it once for all responses to a prompt.

    Attributes:
        compares_responses: it cannot be called for single samples.
    """

    compares_responses = True

    def __init__(
        self,
        *,
        opponents: int | None = 4,
        both_orders: bool = True,
        listwise: bool = False,
        prompt: str | None = None,
        **options: Any,
    ) -> None:
        """Create the judge.

        Args:
            opponents: the number of other responses that each one is compared with, rounded up to an even number;
                ``None`` for all. 2 is a circle.
            both_orders: compare each pair in both orders, which cancels the position bias of the judge. Otherwise each
                response is shown first as often as second.
            listwise: rank all responses in one request instead; scores are evenly spaced, from 1 to 0.
            prompt: the template, with the fields ``question``, ``first`` and ``second``; with `listwise`
                ``question``, ``answers`` and ``form``.
            options: see `Asker`.

        Raises:
            ConfigError: an option is invalid.
        """
        self._opponents, self._both_orders, self._listwise = opponents, both_orders, listwise
        if listwise and (options.get("judges") or options.get("votes", 1) != 1):
            raise ConfigError("listwise asks one judge once: leave out judges and votes")
        if listwise:
            # A placeholder: `_rank` passes the verdict for the size of the group.
            self._asker = Asker(prompt or prompt_of("order"), Order(2), ["answers"], **options)
        else:
            self._asker = Asker(prompt or prompt_of("pair"), _BETTER, ["first", "second"], **options)

    async def compute_score(
        self, solution_strs: list[str], extra_infos: list[dict[str, Any]], reward_router_address: str | None = None
    ) -> list[dict[str, Any] | None]:
        """Return the score of each response; a response without any verdict is unscored.

        With pairs, also ``order_flips``: the share of its pairs that another response wins if the order is swapped; and
        ``first_wins``: the share of wins of the answer shown first, in the whole group. 0.5 is without position bias.
        """
        # The responses of a group have one prompt.
        question = self._asker.question_of(extra_infos[0])
        if self._listwise:
            return await self._rank(question, solution_strs, reward_router_address)

        async def better(first: str, second: str) -> float | None:
            return (await self._asker.ask(reward_router_address, question=question, first=first, second=second)).score

        count = len(solution_strs)
        compared = await compare_all(solution_strs, better, swap=self._both_orders, opponents=self._opponents)
        won_first = [one.result for one in compared if one.result is not None]
        shared = {"first_wins": fmean(won_first)} if won_first else {}
        return [
            {"score": score, **shared, **({} if flips is None else {"order_flips": flips})}
            for score, flips in zip(win_rates(count, compared), order_flips(count, compared), strict=True)
        ]

    async def _rank(self, question: Any, answers: list[str], router: str | None) -> list[dict[str, Any] | None]:
        form = "Ranking: " + " > ".join(f"N{number}" for number in range(1, len(answers) + 1))
        judgement = await self._asker.ask(router, Order(len(answers)), question=question, answers=answers, form=form)
        scores = [None] * len(answers) if judgement.verdict is None else ranking(judgement.verdict)
        return [{**judgement.reward(), "score": score} for score in scores]
