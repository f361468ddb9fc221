"""Distributions of judging times, by name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_loop.errors import ConfigError

__all__ = ["Latency", "parse_latency"]

_FORMS = "uniform:LOW:HIGH, constant:SECONDS, lognormal:MEDIAN:SIGMA, exponential:MEAN, file:PATH"

LONGEST_S = 1e9
"""The longest judging time allowed, in seconds; keeps sums finite."""

WIDEST = 10.0
"""The largest sigma allowed for a lognormal distribution; its mean is median * exp(sigma**2 / 2)."""


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of judging times."""

    name: str
    mean: float
    """In seconds."""
    draw: Callable[[random.Random], float]


def parse_latency(text: str) -> Latency:
    """Read ``uniform:1:40``, ``constant:2``, ``lognormal:3:0.8``, ``exponential:5`` or ``file:latencies.jsonl``.

    A file has a number in each line, or an object with ``seconds``, ``latency`` or ``reward_seconds``, such as the
    output of ``reward-loop score``; the simulation draws from these numbers.

    Raises:
        ConfigError: the text matches none of these forms, or the file cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        values = _read(Path(rest))
        return Latency(text, sum(values) / len(values), lambda rng: rng.choice(values))
    try:
        numbers = [float(part) for part in rest.split(":")]
    except ValueError:
        numbers = []
    if all(0 <= number <= LONGEST_S for number in numbers):
        match kind, numbers:
            case "uniform", [low, high] if low <= high:
                return Latency(text, (low + high) / 2, lambda rng: low + (high - low) * rng.random())
            case "constant", [seconds]:
                return Latency(text, seconds, lambda rng: seconds)
            case "lognormal", [median, sigma] if median > 0 and sigma <= WIDEST:
                mean = median * math.exp(sigma * sigma / 2)
                return Latency(text, mean, lambda rng: rng.lognormvariate(math.log(median), sigma))
            case "exponential", [mean] if mean > 0:
                return Latency(text, mean, lambda rng: rng.expovariate(1 / mean))
    raise ConfigError(
        f"invalid judge latency {text!r}: write one of {_FORMS}; times must be from 0 to {LONGEST_S:g} seconds"
    )


def _read(path: Path) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge latencies cannot be read: {error}") from None
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            seconds = float(_seconds(json.loads(line)))
        except (ValueError, TypeError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds <= LONGEST_S:
            raise ConfigError(
                f"{path}, line {number}: expected seconds, or an object with seconds, latency or reward_seconds"
            )
        values.append(seconds)
    if not values:
        raise ConfigError(f"{path} contains no latencies")
    return values


def _seconds(value: Any) -> Any:
    if isinstance(value, dict):
        for key in ("seconds", "latency", "reward_seconds"):
            if key in value:
                return value[key]
        return _seconds(value.get("reward_extra_info"))
    return None if isinstance(value, bool) else value
