"""Compares the values of the monitors with their limits, and raises warnings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from reward_loop.audit.monitors import MONITORS, Decode, History, Monitor, Reading
from reward_loop.audit.values import Observation
from reward_loop.config import HealthConfig

__all__ = ["Findings", "HealthWarning", "HealthWatch"]


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A monitor that has just exceeded its limit."""

    step: int
    """The step in which the warning was raised."""
    monitor: str
    subject: str
    """The component, reference or kind of probe; empty if the warning is about the step as a whole."""
    message: str
    """The observation, its first step, and where to look."""
    value: float
    threshold: float
    """The limit that the value exceeded."""
    since: int
    """The first of the steps in a row that exceeded the limit."""
    samples: list[str]
    """The uids of samples of the step that show the problem; only of monitors that compare samples."""
    tokens: list[int] = field(default_factory=list)
    """The token IDs of the phrase of a warning about one."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The values of the monitors in one step, and the warnings that begin with it."""

    values: dict[str, float]
    """The value of each monitor that has one; of several components, the largest."""
    warnings: list[HealthWarning]
    active: int
    """The number of warnings that have begun and not ended."""


@dataclass
class _Series:
    """The values of one monitor for one subject."""

    first: list[float] = field(default_factory=list)
    """The values of the baseline steps."""
    beyond: list[int] = field(default_factory=list)
    """The latest steps in a row whose values exceeded the limit."""
    within: int = 0
    """The number of latest steps in a row whose values were within the limit."""
    is_active: bool = False
    is_cleared: bool = False
    """Whether a test has cleared the active warning."""

    def baseline(self, steps: int) -> float | None:
        """Return the median of the first values; ``None`` before there are `steps` of them."""
        return statistics.median(self.first) if len(self.first) >= steps else None


class HealthWatch:
    """Runs the monitors on each training step. Keeps the history that they need.

    A warning begins when the value of a monitor exceeds its limit in ``patience`` steps in a row, and ends after the
    same number of steps in a row within the limit; only then can the monitor warn again. For ``score_jump`` and
    the monitors of probes, which compare with earlier steps themselves, one step is enough for both. Steps without a
    value change nothing.

    Example::

        watch = HealthWatch(HealthConfig(masked_share=0.1))
        for warning in watch.check(observation).warnings:
            print(warning.message)

    Args:
        options: the thresholds.
        decode: returns the text of token IDs; called only for the phrases of warnings. By default a list of numbers.
    """

    def __init__(self, options: HealthConfig, decode: Decode = str) -> None:
        self._options = options
        self._thresholds = {monitor.name: getattr(options, monitor.name) for monitor in MONITORS}
        self._history = History(options, decode)
        self._series: dict[tuple[str, str], _Series] = {}

    def check(self, observation: Observation) -> Findings:
        """Return the values of the monitors for the next step, and its new warnings."""
        self._history.widen(observation.components)
        values: dict[str, float] = {}
        warnings: list[HealthWarning] = []
        for monitor in MONITORS:
            if self._thresholds[monitor.name] is None:
                continue
            readings = monitor.read(observation, self._history)
            if readings:
                values[monitor.name] = max((reading.value for reading in readings.values()), key=abs)
            warnings += self._judge(monitor, readings, observation.step)
        self._history.add(observation)
        active = sum(series.is_active and not series.is_cleared for series in self._series.values())
        return Findings(values, warnings, active)

    def clear(self, warning: HealthWarning) -> None:
        """End a warning without a reason: the judge does not pay for the phrase, or for length.

        Later warnings are about other phrases; that of another monitor comes again only after the value was within the
        limit.
        """
        series = self._series[warning.monitor, warning.subject]
        if warning.tokens:
            self._history.phrases.clear(warning.tokens)
            series.is_active = False
            series.beyond.clear()
        else:
            series.is_cleared = series.is_active

    def _judge(self, monitor: Monitor, readings: Mapping[str, Reading], step: int) -> list[HealthWarning]:
        warnings = []
        patience = 1 if monitor.is_event else self._options.patience
        for subject, reading in readings.items():
            series = self._series.setdefault((monitor.name, subject), _Series())
            baseline = series.baseline(self._options.baseline_steps)
            limit = monitor.limit(self._thresholds[monitor.name], baseline)
            if baseline is None:
                series.first.append(reading.value)
            if abs(reading.value if reading.certain is None else reading.certain) <= limit:
                series.beyond.clear()
                series.within += 1
                series.is_active = series.is_active and series.within < patience
                series.is_cleared = series.is_cleared and series.is_active
                continue
            series.within = 0
            series.beyond = [*series.beyond, step][-patience:]
            if len(series.beyond) == patience and not series.is_active:
                series.is_active = True
                warnings.append(_warning(monitor, subject, reading, limit, baseline, series.beyond[0], step))
        return warnings


def _warning(
    monitor: Monitor, subject: str, reading: Reading, limit: float, baseline: float | None, since: int, step: int
) -> HealthWarning:
    fields = {**reading._asdict(), "subject": subject, "limit": limit, "baseline": baseline}
    steps = f"In step {step}" if since == step else f"Since step {since}"
    message = f"{steps}, {monitor.seen.format(**fields)}. {monitor.look.format(**fields)}."
    shown = list(reading.samples), list(reading.tokens)
    return HealthWarning(step, monitor.name, subject, message, reading.value, limit, since, *shown)
