"""Requests for permits without an event loop, for tests in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reward_loop.limits.limiter import Waiting
from reward_loop.limits.permit import Permit


class Request:
    """Stands for the future of a request: calls a function as soon as the permit is granted."""

    def __init__(self, granted: Callable[[], Any]) -> None:
        self._granted = granted
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, permit: Permit) -> None:
        self._done = True
        self._granted()

    def cancel(self) -> None:
        self._done = True


def asking(tokens: float, traffic_class: str, granted: Callable[[], Any]) -> Waiting:
    """Return a request for a permit that calls ``granted`` when it is granted."""
    request: Any = Request(granted)
    return Waiting(Permit(None, "judge", tokens), traffic_class, request)
