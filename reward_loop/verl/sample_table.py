"""Logs some samples of a step as a table in W&B and MLflow; docs/records.md describes it."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from reward_loop.config import RewardLoopConfig
from reward_loop.records import cleaned, hide_environment
from reward_loop.types import is_returned
from reward_loop.verl.reward_metrics import Info, StepRewards
from reward_loop.verl.trajectory_keys import session_of

logger = logging.getLogger(__name__)

NAME = "reward_loop/samples"
"""The name of the table in W&B, and the start of the names of the files in MLflow."""

COLUMNS = ("step", "why", "uid", "prompt", "response", "score", "reward", "outcome", "components", "error")

MAX_TEXT = 4000
"""The largest number of characters of a text. Of longer ones, the first and the last half of it are kept."""

STEPS_PER_FILE = 50
"""The number of training steps in one file of MLflow. To add rows, MLflow reads and writes the whole file. It also
lists all files of a run in a tag of at most 8,000 characters."""

Table = Sequence[Sequence[Any]]

ReadTexts = Callable[[list[str]], Iterable[tuple[str, str]]]
"""Returns the prompt and the response of each key."""


class SampleTable:
    """Logs at most ``size`` samples of every ``every``-th training step as a table."""

    def __init__(self, size: int, every: int) -> None:
        self._size = size
        self._every = every
        self._failed: set[str] = set()
        # The tables leave the machine: `cleaned` replaces what is hidden.
        hide_environment()

    @classmethod
    def of(cls, options: RewardLoopConfig, loggers: str | Collection[str]) -> Self | None:
        """Return the table of a run; ``None`` if no samples are logged.

        ``loggers`` is verl's ``trainer.logger``. Loggers without tables are named once in the log.
        """
        if not options.log_samples:
            return None
        names = [loggers] if isinstance(loggers, str) else list(loggers)
        with_tables = {"wandb" if name == "tracking" else name for name in names} & _WRITERS.keys()
        if not with_tables:
            logger.warning(
                "reward_loop.log_samples=%d has no effect: trainer.logger=%s has no logger with tables; add wandb or "
                "mlflow",
                options.log_samples,
                names,
            )
            return None
        logger.info("reward_loop.log_samples: samples are logged as tables to %s", ", ".join(sorted(with_tables)))
        return cls(options.log_samples, options.log_samples_every)

    def log(self, step: int, rewards: StepRewards, read: ReadTexts, loggers: Collection[str]) -> None:
        """Log the samples of a step, if it is one of those with a table, to those of the loggers that are running.

        Errors are logged, and cost only the table.
        """
        if step % self._every or not rewards.trajectories:
            return
        rows: Table | None = None
        for name in sorted(_WRITERS.keys() & loggers):
            try:
                rows = rows or self._rows(step, rewards, read)
                _WRITERS[name](step, rows)
            except Exception:  # observability must not stop a run
                if name not in self._failed:
                    logger.exception("reward_loop.log_samples: no table of step %d in %s", step, name)
                self._failed.add(name)

    def _rows(self, step: int, rewards: StepRewards, read: ReadTexts) -> Table:
        chosen = chosen_keys(rewards, self._size, random.Random(step))
        rows = []
        for (key, why), (prompt, response) in zip(chosen.items(), read(list(chosen)), strict=True):
            sample = rewards.trajectories[key]
            row = {
                "step": step,
                "why": why,
                "uid": session_of(key)[0],
                "prompt": prompt,
                "response": response,
                "score": float(sample.raw_score) if sample.is_scored else None,
                "reward": None if sample.is_masked else sample.reward,
                "outcome": sample.outcome,
                "components": _components(sample.info),
                "error": str(sample.info.get("reward_error") or ""),
            }
            rows.append([_bounded(value) for value in cleaned(row).values()])
        return rows


def chosen_keys(rewards: StepRewards, size: int, generator: random.Random) -> dict[str, str]:
    """Return the keys of at most ``size`` samples of a step, each with the reason why it was chosen.

    In turn: a sample without a score, failed ones first; the one with the lowest score; the one with the highest score;
    one at random.
    """
    samples = rewards.samples()
    without = sorted(
        (key for key, sample in samples.items() if not sample.is_scored), key=lambda key: samples[key].outcome
    )
    ordered = sorted(samples.keys() - set(without), key=lambda key: (samples[key].raw_score, key))
    # Sorted first: the order in which rewards arrived must not change what is drawn.
    at_random = sorted(samples)
    generator.shuffle(at_random)
    queues: list[tuple[str | None, Iterator[str]]] = [
        (None, iter(without)),
        ("lowest", iter(ordered)),
        ("highest", iter(ordered[::-1])),
        ("random", iter(at_random)),
    ]
    chosen: dict[str, str] = {}
    while len(chosen) < min(size, len(samples)):
        for reason, queue in queues:
            key = next((key for key in queue if key not in chosen), None)
            if key is not None and len(chosen) < size:
                chosen[key] = reason or samples[key].outcome
    return chosen


def _components(info: Info) -> str:
    """Return what the function returned as JSON: the keys may differ between samples and steps."""
    returned = {name: value for name, value in info.items() if is_returned(name) and name != "score"}
    return json.dumps(cleaned(returned), ensure_ascii=False)


def _bounded(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= MAX_TEXT:
        return value
    half = MAX_TEXT // 2
    return f"{value[:half]} ... ({len(value) - 2 * half} characters left out) ... {value[-half:]}"


def _to_wandb(step: int, rows: Table) -> None:
    import wandb

    if wandb.run is not None:
        wandb.log({NAME: wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])}, step=step)


def _to_mlflow(step: int, rows: Table) -> None:
    import mlflow

    columns = {name: list(values) for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    first = step - step % STEPS_PER_FILE
    mlflow.log_table(columns, f"{NAME}_from_step_{first:06}.json")


_WRITERS: Mapping[str, Callable[[int, Table], None]] = {"mlflow": _to_mlflow, "wandb": _to_wandb}
