"""Reports of the client's requests to the limits that hold them: their tokens, and how they ended."""

from __future__ import annotations

from collections.abc import Iterator

from reward_loop.limits.lease import Lease, current_call, current_lease
from reward_loop.limits.permit import answer_of

__all__ = ["book_tokens", "report_answer"]


def book_tokens(tokens: float) -> None:
    """Count the tokens of one request of the current code, once in each limit that it holds and in the budget."""
    counted: set[str] = set()
    for lease in _leases():
        if lease.name not in counted:  # a limit may be held twice
            lease.add(tokens, to_budget=not counted)
            counted.add(lease.name)
    if not counted and tokens and (call := current_call()) is not None:
        call.run(call.spend, 0.0, tokens)


def report_answer(error: BaseException | None) -> None:
    """Report how a request of the current code ended to the adaptive limits that it holds."""
    answer = answer_of(error)
    if answer[0]:
        return
    for lease in _leases():
        lease.answer(*answer)
    if (call := current_call()) is not None:
        call.answer(*answer)


def _leases() -> Iterator[Lease]:
    """Yield the leases that the current code holds, the innermost first."""
    lease = current_lease.get()
    while lease is not None:
        yield lease
        lease = lease.outer
