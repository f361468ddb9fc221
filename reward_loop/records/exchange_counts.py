"""Counts the exchanges with model servers, for the monitors of a training step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ExchangeCounts"]

MAX_SECONDS = 4096
"""The largest number of durations that are kept: the latest ones."""


class ExchangeCounts:
    """The exchanges of one process since the last `take`: their number, missing verdicts and durations.

    The exchanges of a batch call count once for each of its samples. Several threads may add exchanges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._calls = self._without_verdict = 0
        self._seconds: deque[float] = deque(maxlen=MAX_SECONDS)

    def add(self, exchanges: Sequence[Mapping[str, Any]]) -> None:
        """Add the exchanges of a sample."""
        with self._lock:
            self._calls += len(exchanges)
            self._without_verdict += sum(bool(exchange.get("unscored")) for exchange in exchanges)
            self._seconds.extend(exchange.get("seconds") or 0.0 for exchange in exchanges)

    def take(self) -> dict[str, Any]:
        """Return ``calls``, ``without_verdict`` and ``seconds``, and start again from zero."""
        with self._lock:
            taken = {
                "calls": self._calls,
                "without_verdict": self._without_verdict,
                "seconds": list(self._seconds),
            }
            self._reset()
        return taken
