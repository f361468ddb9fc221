"""Logs rewards through TRL: metrics, and columns of the table of completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from reward_loop._util.json import encode
from reward_loop.types import Outcome, Reward, finite_number, is_returned

__all__ = ["RewardLog"]


class RewardLog:
    """Logs the outcomes and the components of the rewards of batches.

    The first batch determines the columns, and which of them have numbers: TRL's table needs columns of one length and
    type.

    Args:
        name: the name of the reward function, with which all names begin.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numeric: dict[str, bool] | None = None

    def metrics(self, rewards: Sequence[Reward]) -> dict[str, float]:
        """Return the metrics of a batch: the number of samples by outcome, mean seconds, and the mean components."""
        infos = [reward["reward_extra_info"] for reward in rewards]
        outcomes = Counter(str(info.get("reward_outcome", Outcome.SCORED)) for info in infos)
        group = f"reward_loop/{self._name}"
        metrics: dict[str, float] = {f"{group}/{outcome}": outcomes[outcome] for outcome in Outcome}
        metrics[f"{group}/masked"] = sum(bool(info.get("reward_masked")) for info in infos)
        if seconds := [info["reward_seconds"] for info in infos if "reward_seconds" in info]:
            metrics[f"{group}/seconds"] = sum(seconds) / len(seconds)
        for key in _components(infos):
            numbers = (finite_number(info.get(key)) for info in infos)
            if values := [number for number in numbers if number is not None]:
                metrics[f"reward_components/{self._name}/{key}"] = sum(values) / len(values)
        return metrics

    def columns(self, rewards: Sequence[Reward]) -> dict[str, list[Any]]:
        """Return a column for the outcomes, and one for each component of the first batch."""
        infos = [reward["reward_extra_info"] for reward in rewards]
        if self._numeric is None:
            self._numeric = {
                key: all(finite_number(info[key]) is not None for info in infos if info.get(key) is not None)
                for key in _components(infos)
            }
        columns: dict[str, list[Any]] = {
            f"{self._name}/outcome": [str(info.get("reward_outcome", Outcome.SCORED)) for info in infos],
            f"{self._name}/error": [str(info.get("reward_error") or "") for info in infos],
        }
        for key, is_numeric in self._numeric.items():
            convert = finite_number if is_numeric else _text
            columns[f"{self._name}/{key}"] = [convert(info.get(key)) for info in infos]
        return columns

    def log(
        self,
        rewards: Sequence[Reward],
        log_extra: Callable[[str, list[Any]], None] | None,
        log_metric: Callable[[str, float], None] | None,
    ) -> None:
        """Log a batch through the functions that TRL passes, each of which may be missing."""
        if log_metric is not None:
            for name, value in self.metrics(rewards).items():
                log_metric(name, value)
        if log_extra is not None:
            for name, values in self.columns(rewards).items():
                log_extra(name, values)


def _components(infos: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys that functions have set, in order of their first appearance, without the score: TRL logs it."""
    return [key for key in dict.fromkeys(key for info in infos for key in info) if is_returned(key) and key != "score"]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else encode(value).decode()
