"""Private parts of verl, and functions that differ between its releases, with the interface of the newest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

__all__ = ["running_loggers", "with_missing_values"]

ValidationMetrics = Callable[..., dict[str, float]]
"""verl's ``_val_metrics_update(data_sources, uids, columns, turns, expected_acc_counts)``."""


def running_loggers(tracking: Any) -> frozenset[str]:
    """Returns the names of the loggers that verl has started. It continues without MLflow if that does not start.

    Args:
        tracking: verl's ``Tracking``.
    """
    return frozenset(tracking.logger)


def with_missing_values(verls: ValidationMetrics) -> ValidationMetrics:
    """Returns verl's function for validation metrics, for columns in which ``None`` stands for a missing value.

    From verl 0.9.1 on, this is verl's own function. verl 0.9.0 rejects ``None``, and does not count failed rollouts as
    ``acc`` 0: there, the function is called once for each column, with the samples that have a value, and
    ``expected_acc_counts`` has no effect. A column has majority votes (``maj@N``) only if all these samples have a
    ``pred``.
    """
    if "expected_acc_counts" in inspect.signature(verls).parameters:
        return verls
    return partial(_column_by_column, verls)


def _column_by_column(
    verls: ValidationMetrics,
    data_sources: Sequence[Any],
    uids: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    turns: Sequence[Any],
    expected_acc_counts: object = None,
) -> dict[str, float]:
    metrics = verls(data_sources, uids, {}, turns)
    predictions = columns.get("pred")
    for name, column in columns.items():
        rows = [row for row, value in enumerate(column) if value is not None]
        present = {name: [column[row] for row in rows]}
        if predictions is not None and all(predictions[row] is not None for row in rows):
            present["pred"] = [predictions[row] for row in rows]
        metrics |= verls([data_sources[row] for row in rows], [uids[row] for row in rows], present, ())
    # Alone, `reward` is a core metric of every data source; it is not where samples have `acc`.
    accuracies = columns.get("acc") or [None] * len(data_sources)
    with_acc = {source for source, value in zip(data_sources, accuracies, strict=True) if value is not None}
    for source in with_acc:
        core = f"val-core/{source}/reward/"
        for metric in [metric for metric in metrics if metric.startswith(core)]:
            metrics[f"val-aux/{source}/reward/{metric.removeprefix(core)}"] = metrics.pop(metric)
    return metrics
