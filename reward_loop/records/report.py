"""The summary of scored samples: outcomes, scores, components, groups, judges, slow and costly samples."""

from __future__ import annotations

import heapq
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

from reward_loop._util.causes import Causes
from reward_loop.records.prices import NO_PRICES, Prices
from reward_loop.types import Outcome

__all__ = ["MISSING", "Report", "Spread", "look_up"]

SHOWN = 5
"""The number of causes, of slowest and of costliest samples."""

MISSING = object()
"""What `look_up` returns for a field that does not exist."""


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, such as ``components.acc``; `MISSING` if there is none."""
    value: Any = row
    while path:
        if not isinstance(value, Mapping):
            return MISSING
        if path in value:
            return value[path]
        name, _, path = path.partition(".")
        value = value.get(name, MISSING)
    return MISSING


class Spread:
    """The distribution of numbers."""

    def __init__(self) -> None:
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a number. Numbers that are not finite are ignored."""
        if math.isfinite(value):
            self._values.append(value)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return count, mean, population standard deviation, minimum, median, 95th percentile and maximum."""
        if not self._values:
            return {"count": 0, **dict.fromkeys(("mean", "std", "min", "p50", "p95", "max"))}
        values = sorted(self._values)
        cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
        mean = math.fsum(values) / len(values)
        return {
            "count": len(values),
            "mean": mean,
            "std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
            "min": values[0],
            "p50": cuts[9],
            "p95": cuts[18],
            "max": values[-1],
        }


class _Top:
    """The largest numbers, each with the name of its sample."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, number: float, name: str) -> None:
        if number > 0:
            heapq.heappush(self._heap, (number, name))
            if len(self._heap) > SHOWN:
                heapq.heappop(self._heap)

    def to_list(self) -> list[tuple[float, str]]:
        return sorted(self._heap, reverse=True)


class _Group:
    """The rewards of a prompt's samples."""

    __slots__ = ("high", "low", "rewards", "samples")

    def __init__(self) -> None:
        self.samples = self.rewards = 0
        self.low, self.high = math.inf, -math.inf

    def add(self, reward: float | None) -> None:
        self.samples += 1
        if reward is not None:
            self.rewards += 1
            self.low, self.high = min(self.low, reward), max(self.high, reward)


class _Judge:
    """The exchanges with one model."""

    def __init__(self) -> None:
        self.requests = self.errors = self.no_verdict = self.prompt_tokens = self.completion_tokens = 0
        self.statuses: Counter[str] = Counter()
        self.seconds = Spread()

    def add(self, exchange: Mapping[str, Any]) -> None:
        self.requests += 1
        self.errors += bool(exchange.get("error"))
        self.no_verdict += bool(exchange.get("unscored"))
        self.statuses[str(exchange.get("status") or "no answer")] += 1
        self.prompt_tokens += exchange.get("prompt_tokens") or 0
        self.completion_tokens += exchange.get("completion_tokens") or 0
        self.seconds.add(exchange.get("seconds") or 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "errors": self.errors,
            "no_verdict": self.no_verdict,
            "statuses": dict(self.statuses),
            "seconds": self.seconds.to_dict(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


class _Part:
    """The samples with one value of the field `Report.group_by`."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.score = Spread()

    def to_dict(self) -> dict[str, Any]:
        return {"samples": self.outcomes.total(), "outcomes": dict(self.outcomes), "score": self.score.to_dict()}


class Report:
    """Summarises the rows of samples, which are those of records; other rows may lack fields.

    Args:
        group_by: a field of the rows, as a dotted path, by whose values samples are also counted separately.
        prices: the prices of models.
    """

    def __init__(self, group_by: str | None = None, prices: Prices = NO_PRICES) -> None:
        self.group_by = group_by
        self.prices = prices
        self.outcomes: Counter[str] = Counter()
        self.causes = Causes()
        self.score = Spread()
        self.reward = Spread()
        self.masked = self.revised = self.validation = 0
        self.components: dict[str, Spread] = {}
        self.judges: dict[str, _Judge] = {}
        self.parts: dict[Any, _Part] = {}
        self._groups: dict[tuple[Any, Any], _Group] = {}
        self._slowest, self._costliest = _Top(), _Top()
        self._exchanges: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a sample."""
        outcome, score, reward = row["outcome"], row.get("score"), row.get("reward")
        self.outcomes[outcome] += 1
        if row.get("error"):
            self.causes.add(row["error"])
        if score is not None:
            self.score.add(score)
        if reward is not None:
            self.reward.add(reward)
        self.masked += bool(row.get("masked"))
        self.revised += bool(row.get("revised"))
        self.validation += bool(row.get("validate"))
        for name, value in (row.get("components") or {}).items():
            if isinstance(value, int | float) and name != "score":
                self.components.setdefault(name, Spread()).add(value)
        if row.get("group") is not None:
            self._groups.setdefault((row.get("step"), row["group"]), _Group()).add(reward)
        name = str(row.get("uid") or row.get("id") or "without uid")
        self._slowest.add(row.get("total_s") or row.get("work_s") or 0.0, name)
        self._costliest.add((row.get("prompt_tokens") or 0) + (row.get("completion_tokens") or 0), name)
        for exchange in row.get("judges") or ():
            self._add_exchange(row, exchange)
        if self.group_by is not None:
            value = look_up(row, self.group_by)
            if value is not MISSING:
                part = self.parts.setdefault(value if isinstance(value, str | int | float) else str(value), _Part())
                part.outcomes[outcome] += 1
                if score is not None:
                    part.score.add(score)

    def _add_exchange(self, row: Mapping[str, Any], exchange: Mapping[str, Any]) -> None:
        if row.get("batch") is not None:  # all samples of a batch call have its exchanges
            if exchange.get("id") in self._exchanges:
                return
            self._exchanges.add(str(exchange.get("id")))
        self.judges.setdefault(str(exchange.get("model") or exchange.get("url")), _Judge()).add(exchange)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.outcomes.total()

    @property
    def slowest(self) -> list[tuple[float, str]]:
        """Seconds and name of the samples that took longest, the slowest first."""
        return self._slowest.to_list()

    @property
    def costliest(self) -> list[tuple[float, str]]:
        """Tokens and name of the samples whose requests used the most tokens, the costliest first."""
        return self._costliest.to_list()

    def cost_of(self, judge: str) -> float | None:
        """Return the cost of all requests to a judge; ``None`` if its price is unknown."""
        found = self.judges[judge]
        return self.prices.cost(judge, found.prompt_tokens, found.completion_tokens)

    def groups(self) -> dict[str, int]:
        """Return counts of groups of at least two samples.

        ``zero_variance`` have at least two rewards, and all are equal; ``all_failed`` have no reward at all, and
        ``partly_failed`` lack some.
        """
        groups = [group for group in self._groups.values() if group.samples > 1]
        return {
            "groups": len(groups),
            "zero_variance": sum(group.rewards > 1 and group.low == group.high for group in groups),
            "all_failed": sum(not group.rewards for group in groups),
            "partly_failed": sum(0 < group.rewards < group.samples for group in groups),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as values of JSON."""
        return {
            "samples": self.samples,
            "validation": self.validation,
            "outcomes": {str(outcome): self.outcomes[outcome] for outcome in Outcome},
            "masked": self.masked,
            "revised": self.revised,
            "causes": [{"count": count, "example": example} for count, example in self.causes.most_common()],
            "score": self.score.to_dict(),
            "reward": self.reward.to_dict(),
            "components": {name: spread.to_dict() for name, spread in self.components.items()},
            **self.groups(),
            "judges": {name: {**judge.to_dict(), "cost": self.cost_of(name)} for name, judge in self.judges.items()},
            "slowest": [{"seconds": seconds, "sample": name} for seconds, name in self.slowest],
            "costliest": [{"tokens": int(tokens), "sample": name} for tokens, name in self.costliest],
            **({} if self.group_by is None else {"by": self.group_by, "parts": self._parts()}),
        }

    def _parts(self) -> list[dict[str, Any]]:
        # Numbers before texts, each in their order.
        values = sorted(self.parts, key=lambda value: (isinstance(value, str), value))
        return [{"value": value, **self.parts[value].to_dict()} for value in values]
