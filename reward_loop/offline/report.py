"""The summary of scored samples: outcomes, scores, components, groups, judges and their costs, slow samples."""

from __future__ import annotations

import heapq
import math
import re
import statistics
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop._util.intervals import WeightedShare
from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import Causes
from reward_loop.records import Price, false_accepts_of
from reward_loop.types import Outcome

SHOWN = 5
"""The number of causes, of slowest and of costliest samples."""


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


class _Part:
    """Samples that are summarised together: all, or those with one value of the field `Report.group_by`."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.score, self.reward = Spread(), Spread()
        self.false_accepts = WeightedShare()
        """Of the answers that the strong judge of a spot check rejects: the share that the cheap judge accepts."""

    def add(self, row: Mapping[str, Any]) -> None:
        self.outcomes[row["outcome"]] += 1
        for spread, number in ((self.score, row.get("score")), (self.reward, row.get("reward"))):
            if number is not None:
                spread.add(number)
        for accepted, chance in false_accepts_of(row.get("components") or {}):
            self.false_accepts.add(accepted, chance)

    def to_dict(self) -> dict[str, Any]:
        counts = {"samples": self.outcomes.total(), "outcomes": dict(self.outcomes)}
        spreads = {"score": self.score.to_dict(), "reward": self.reward.to_dict()}
        return {**counts, **spreads, "false_accepts": self.false_accepts.to_dict()}


class Report:
    """Summarises the rows of samples, which are those of records; other rows may lack fields.

    The samples of validation are summarised apart, as `validation`.

    Args:
        group_by: a field of the rows, as a dotted path, by whose values samples are also counted separately.
    """

    def __init__(self, group_by: str | None = None) -> None:
        self.group_by = group_by
        self._all = _Part()
        self.outcomes = self._all.outcomes
        self.causes = Causes()
        """Why samples failed."""
        self.unscored = Causes()
        """Why samples are unscored."""
        self.masked = self.over_budget = self.stopped = 0
        self.validation: Report | None = None
        """The summary of the samples of validation; ``None`` if there are none."""
        self.reported_cost: float | None = None
        """The sum of the costs that functions reported, in their unit; ``None`` if there is none."""
        self.components: dict[str, Spread] = {}
        self.judges = Judges()
        self.parts: dict[Any, _Part] = {}
        """The samples with each value of the field."""
        self._groups: dict[tuple[Any, Any], _Group] = {}
        self._slowest, self._costliest = _Top(), _Top()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a sample."""
        if row.get("validate"):
            self.validation = self.validation or Report(self.group_by)
            self.validation._add(row)
        else:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        self._all.add(row)
        outcome, reward = row["outcome"], row.get("reward")
        name = str(row.get("uid") or row.get("id") or "without uid")
        error = row.get("error")
        if outcome == Outcome.UNSCORED:
            reason = next((said for made in row.get("judges") or () if (said := made.get("unscored"))), None)
            why = "the function returned no score" if reason is None else f"the judge's reply has no verdict: {reason}"
            cause = f"{row.get('cause') or outcome}{'' if reason is None else f': {_without_data(reason)}'}"
            self.unscored.add(cause, error or f"sample {name}: {why}")
        elif error:
            self.causes.add(row.get("cause"), error)
        self.masked += bool(row.get("masked"))
        self.over_budget += bool(row.get("over_budget"))
        # Neither masked nor rewarded: with this sample, the policy ended the run.
        self.stopped += row.get("masked") is False and reward is None
        for component, value in (row.get("components") or {}).items():
            if isinstance(value, int | float) and component != "score":
                self.components.setdefault(component, Spread()).add(value)
        if row.get("group") is not None:
            self._groups.setdefault((row.get("step"), row["group"]), _Group()).add(reward)
        self._slowest.add(row.get("total_s") or row.get("work_s") or 0.0, name)
        self._costliest.add((row.get("prompt_tokens") or 0) + (row.get("completion_tokens") or 0), name)
        if (cost := row.get("cost")) is not None:
            self.reported_cost = (self.reported_cost or 0.0) + cost
        self.judges.add(row.get("judges") or (), row.get("batch"))
        if self.group_by is not None:
            value = look_up(row, self.group_by)
            if value is not MISSING:
                self.parts.setdefault(value if isinstance(value, str | int | float) else str(value), _Part()).add(row)

    @property
    def samples(self) -> int:
        """The number of samples, without those of validation."""
        return self.outcomes.total()

    def to_dict(self, price: Price | None = None) -> dict[str, Any]:
        """Return the summary as values of JSON; with a price, also the costs of judges."""
        return {
            **self._all.to_dict(),
            "validation": self.validation and self.validation.to_dict(price),
            "outcomes": {str(outcome): self.outcomes[outcome] for outcome in Outcome},
            "masked": self.masked,
            "over_budget": self.over_budget,
            "stopped": self.stopped,
            "causes": _listed(self.causes),
            "unscored_causes": _listed(self.unscored),
            "components": {name: spread.to_dict() for name, spread in self.components.items()},
            **self._group_counts(),
            "judges": self.judges.to_dict(price),
            "reported_cost": self.reported_cost,
            "slowest": [{"seconds": seconds, "sample": name} for seconds, name in self._slowest.to_list()],
            "costliest": [{"tokens": int(tokens), "sample": name} for tokens, name in self._costliest.to_list()],
            **({} if self.group_by is None else {"by": self.group_by, "parts": self._parts()}),
        }

    def _group_counts(self) -> dict[str, int]:
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

    def _parts(self) -> list[dict[str, Any]]:
        # Numbers before texts, each in their order.
        values = sorted(self.parts, key=lambda value: (isinstance(value, str), value))
        return [{"value": value, **self.parts[value].to_dict()} for value in values]


def _listed(causes: Causes) -> list[dict[str, Any]]:
    return [{"count": count, "cause": cause, "example": example} for count, cause, example in causes.most_common()]


def _without_data(reason: str) -> str:
    """Return why a reply has no verdict, without what it quotes of the reply."""
    return re.sub(r"""'[^']*'|"[^"]*"|-?\d+(\.\d+)?""", "...", reason)


class _Judge:
    """The requests to one model."""

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
        return {**vars(self), "statuses": dict(self.statuses), "seconds": self.seconds.to_dict()}


class Judges:
    """The requests to judges by model, or by URL where it is unknown.

    A failed request may name no model. It belongs to the only model that answers at its URL.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, _Judge] = {}
        self._models: dict[str, set[str]] = {}
        """The models that have answered at a URL."""
        self._nameless: list[Mapping[str, Any]] = []
        """The requests without a model."""
        self._of_batches: set[str] = set()

    def add(self, exchanges: Sequence[Mapping[str, Any]], batch: str | None = None) -> None:
        """Add the requests of a sample. Those of a batch call, which all of its samples have, count once."""
        for exchange in exchanges:
            if batch is not None:
                if (name := str(exchange.get("id"))) in self._of_batches:
                    continue
                self._of_batches.add(name)
            if model := exchange.get("model"):
                self._models.setdefault(str(exchange.get("url")), set()).add(model)
                self._by_name.setdefault(model, _Judge()).add(exchange)
            else:
                self._nameless.append(exchange)

    def to_dict(self, price: Price | None = None) -> dict[str, Any]:
        """Return the counts of each judge as values of JSON, with ``cost``, which is ``None`` if it is unknown."""
        for exchange in self._nameless:
            url = str(exchange.get("url"))
            models = self._models.get(url, set())
            self._by_name.setdefault(next(iter(models)) if len(models) == 1 else url, _Judge()).add(exchange)
        self._nameless.clear()
        counts = {name: judge.to_dict() for name, judge in self._by_name.items()}
        return {name: {**found, "cost": None if price is None else price.cost(found)} for name, found in counts.items()}


_EXPONENT = 400


class Spread:
    """The distribution of numbers."""

    def __init__(self) -> None:
        # 8 bytes for each number: a list of floats takes four times as much, and a run may have millions of samples.
        self._values = array("d")

    def add(self, value: float) -> None:
        """Add a number. Numbers that are not finite, or are beyond the range of float, are ignored."""
        if -sys.float_info.max <= value <= sys.float_info.max:
            self._values.append(value)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return count, mean, population standard deviation, minimum, median, 95th percentile and maximum."""
        if not self._values:
            return {"count": 0, **dict.fromkeys(("mean", "std", "min", "p50", "p95", "max"))}
        values = sorted(self._values)
        low, high = values[0], values[-1]
        # Sums and squares of larger numbers are beyond the range of float, so these are scaled by a power of two.
        exponent = max(0, math.frexp(max(-low, high))[1] - _EXPONENT)
        if exponent:
            values = [math.ldexp(value, -exponent) for value in values]
        # `quantiles` refuses a single value (Python < 3.13).
        cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return {
            "count": len(values),
            "mean": math.ldexp(mean, exponent),
            "std": math.ldexp(std, exponent),
            "min": low,
            "p50": math.ldexp(cuts[9], exponent),
            "p95": math.ldexp(cuts[18], exponent),
            "max": high,
        }
