"""Prints the estimate of ``reward-loop score --dry-run``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.text import rounded
from reward_loop.offline.estimate import CHARACTERS_PER_TOKEN, Estimate
from reward_loop.records.prices import Prices

__all__ = ["estimate_as_json", "show_estimate"]


def estimate_as_json(found: Estimate, prices: Prices) -> dict[str, Any]:
    """Return the estimate as values of JSON."""
    price = prices.of_all(found.models)
    low, high = (None, None) if price is None else found.cost(price)
    return {
        "rows": found.rows,
        "tried": found.tried,
        "requests": found.requests,
        "prompt_tokens": found.prompt_tokens,
        "max_reply_tokens": found.max_reply_tokens,
        "min_cost": low,
        "max_cost": high,
        "models": found.models,
        "refused_connections": found.refused,
        "causes": [{"count": count, "example": example} for count, example in found.causes.most_common()],
    }


def show_estimate(found: Estimate, prices: Prices, out: Console) -> None:
    """Print the estimate, and how it was made."""
    table = Table.grid(padding=(0, 2))
    table.add_row("rows", f"{found.rows:,}; the function was called for {found.tried:,}, and no request was sent")
    models = f", to {escape(', '.join(found.models))}" if found.models else ""
    table.add_row("requests", f"about {rounded(found.requests)}{models}")
    if found.requests:
        tokens = f"about {rounded(found.prompt_tokens)} ({CHARACTERS_PER_TOKEN} characters for a token)"
        table.add_row("prompt tokens", tokens)
        longest = found.max_reply_tokens
        text = "unknown: requests have no max_tokens" if longest is None else f"at most {rounded(longest)} (max_tokens)"
        table.add_row("reply tokens", text)
        table.add_row("cost", _cost(found, prices))
    out.print(table)
    if found.requests:
        out.print("Not counted: requests that depend on a reply, and retries.")
    if found.refused:
        out.print(
            f"{found.refused:,} connections of other clients than reward_loop.client were refused: what they would "
            "have sent is not in the estimate."
        )
    for count, example in found.causes.most_common(5):
        failed = f"{count} of the {found.tried} rows failed before a request, first"
        out.print(f"{failed}: {escape(example)}")


def _cost(found: Estimate, prices: Prices) -> str:
    price = prices.of_all(found.models)
    if not prices:
        return "unknown: give --price PROMPT:REPLY"
    if price is None:
        return "unknown: --price does not give all models the same price"
    low, high = found.cost(price)
    return f"{rounded(low)} and the replies" if high is None else f"{rounded(low)} to {rounded(high)}"
