"""A tournament: each response of a group is compared with the others, in both orders; its score is its share of wins.

Use it with the manager `group`, which calls the function once for all responses to a prompt.
"""

from __future__ import annotations

from typing import Any

from reward_loop.client import Choice, Judge
from reward_loop.scoring import tournament

judge = Judge(
    """Which answer to the question is better: the first or the second?

Question: {{question}}

[The first answer]
{{first}}

[The second answer]
{{second}}

[Your verdict]
Compare the answers in two sentences. Neither their length nor their order matters. End with `[[A]]` if the first is \
better, `[[B]]` if the second is better, or `[[tie]]`.""",
    Choice({"A": 1.0, "B": 0.0, "tie": 0.5}, after="[["),
    limit="judge",
    max_tokens=256,
)


async def compute_score(
    solution_strs: list[str], extra_infos: list[dict[str, Any]], reward_router_address: str, opponents: int = 4
) -> list[float | None]:
    """Return the share of wins of each response; a response without any verdict is unscored.

    Args:
        opponents: the number of other responses with which each one is compared, twice each.
    """
    question = extra_infos[0]["question"]

    async def better(first: str, second: str) -> float | None:
        judgement = await judge(reward_router_address, question=question, first=first, second=second)
        return judgement.score

    return await tournament(solution_strs, better, opponents=opponents)
