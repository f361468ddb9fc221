"""Simulates a training run with a virtual clock: the step time in each mode, and with more judging concurrency."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from reward_loop.agent.latency import Latency, parse_latency
from reward_loop.agent.schedule import Generate, Prepare, Schedule, Wait
from reward_loop.errors import ConfigError

__all__ = ["Judging", "Part", "Run", "Workload", "draw_timeline", "enough_concurrency", "simulate", "with_concurrency"]

SHOWN_STEPS = 4
"""The number of steps in a timeline."""


@dataclass(frozen=True)
class Workload:
    """The parts of a training step. Times are in seconds."""

    batch: int = 1024
    """Prompts per step; each is a group."""
    responses: int = 5
    """Responses per prompt."""
    judge: Latency = field(default_factory=lambda: parse_latency("uniform:1:40"))
    """The judging time of one response."""
    concurrency: int = 256
    """The number of responses that are judged at a time."""
    generation: float = 103.0
    training: float = 100.0
    """All updates of a step together."""
    prepare: float = 0.0
    """Log-probabilities and values, which need no reward; not part of `training`."""
    mini_batches: int = 4
    steps: int = 100
    seed: int = 0
    arrival: Literal["end", "during"] = "end"
    """When samples reach the judge: all at the end of generation, or one after the other during generation."""
    one_batch_at_a_time: bool = False
    """Whether judging a batch starts only after the batch before has ended, as in verl#2854."""

    def __post_init__(self) -> None:
        for name in ("batch", "responses", "concurrency", "mini_batches", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: at least 1, got {getattr(self, name)}")
        for name in ("generation", "training", "prepare"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name}: a number of seconds, got {getattr(self, name)}")
        if self.mini_batches > self.batch:
            raise ConfigError(f"{self.mini_batches} mini-batches of {self.batch} prompts: some would be empty")

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.batch * self.responses

    @property
    def gpu_seconds(self) -> float:
        """The step time if judging took no time."""
        return self.generation + self.prepare + self.training

    def draws(self, step: int) -> list[float]:
        """Return the judging times of a step; they are the same in every mode."""
        rng = random.Random(f"{self.seed}:{step}")
        draw = self.judge.draw
        return [draw(rng) for _ in range(self.samples)]


@dataclass(frozen=True, slots=True)
class Part:
    """One activity of the trainer, with its start and end."""

    kind: str
    """``generate``, ``prepare``, ``wait`` or ``train``."""
    step: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Judging:
    """The judging of one step."""

    start: float
    """The start of its first judge call."""
    end: float
    """The end of its last one."""
    seconds: float
    """The sum of its judging times."""
    longest: float
    """Its longest judging time."""
    ready: list[float]
    """The time at which each mini-batch has all its rewards."""


@dataclass(frozen=True)
class Run:
    """A simulated run in one mode."""

    mode: str
    workload: Workload
    seconds: float
    """The length of the whole run."""
    parts: list[Part]
    judging: list[Judging]
    """For each step."""
    calls: list[tuple[float, float]]
    """Start and end of each judge call of the first steps."""

    @property
    def step_seconds(self) -> float:
        """The length of the whole run, including its start, divided by the number of steps."""
        return self.seconds / self.workload.steps

    @property
    def over_floor(self) -> float:
        """How much longer a step is than its `floor`, as a share of the floor."""
        return self.step_seconds / self.floor - 1 if self.floor else 0.0

    @property
    def waiting(self) -> float:
        """Seconds per step in which the trainer waited for rewards."""
        return sum(part.end - part.start for part in self.parts if part.kind == "wait") / self.workload.steps

    @property
    def hidden(self) -> float:
        """The hidden share of judging: of the time in which samples of a step were judged, the share in which the
        trainer did not wait."""
        waits = [part for part in self.parts if part.kind == "wait"]
        total = sum(step.end - step.start for step in self.judging)
        waited = sum(
            max(0.0, min(step.end, wait.end) - max(step.start, wait.start)) for step in self.judging for wait in waits
        )
        return 1.0 - waited / total if total else 1.0

    @property
    def judge_seconds(self) -> float:
        """The judging time of a step at full concurrency, if judges are always busy; the mean over all steps."""
        return sum(step.seconds for step in self.judging) / self.workload.concurrency / self.workload.steps

    @property
    def floor(self) -> float:
        """The lower bound for the step time in this mode with these judging times, in seconds.

        With both overlaps, or off-policy alone, it is max(G + T, R): generation and training, or all judging at full
        concurrency. Otherwise the judging of a step must end before its training, or the last part of it, starts.
        """
        load = self.workload
        schedule = Schedule.of_mode(self.mode, load.mini_batches)
        if schedule.one_step_off_policy:
            return max(load.gpu_seconds, self.judge_seconds)
        last = load.training / load.mini_batches
        floors = []
        for step in self.judging:
            seconds = max(step.seconds / load.concurrency, step.longest)
            if schedule.mini_batch_pipeline and load.arrival == "end":
                floors.append(load.generation + max(load.prepare + load.training, seconds + last))
            elif schedule.mini_batch_pipeline:
                floors.append(max(load.gpu_seconds, seconds + last))
            elif load.arrival == "end":
                floors.append(load.gpu_seconds + seconds)
            else:
                floors.append(max(load.generation, seconds) + load.prepare + load.training)
        return sum(floors) / len(floors)


def simulate(workload: Workload, mode: str) -> Run:
    """Simulate a workload in one of the `schedule.MODES`."""
    schedule = Schedule.of_mode(mode, workload.mini_batches)
    judges = _Judges(workload)
    parts: list[Part] = []
    now = 0.0

    def ready(step: int) -> int:
        return bisect_right(judges.steps[step].ready, now)

    for action in schedule.actions(workload.steps, ready):
        started = now
        if isinstance(action, Generate):
            now += workload.generation
            judges.submit(started, now)
        elif isinstance(action, Prepare):
            now += workload.prepare
        elif isinstance(action, Wait):
            now = max(now, judges.steps[action.step].ready[action.mini_batches - 1])
        else:
            now += workload.training * action.count / workload.mini_batches
        if now > started:
            parts.append(Part(type(action).__name__.lower(), action.step, started, now))
    return Run(mode, workload, now, parts, judges.steps, judges.calls)


def enough_concurrency(workload: Workload) -> int:
    """Return the concurrency at which judging takes no longer than generation and training."""
    if workload.gpu_seconds == 0:
        return workload.samples
    return max(1, min(workload.samples, math.ceil(workload.samples * workload.judge.mean / workload.gpu_seconds)))


class _Judges:
    """Judges that serve samples in order of arrival. A later sample never delays an earlier one, so the end of a sample
    is fixed when it is submitted."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        # At most two steps are in flight, so more judges than that have no effect.
        self._free = [0.0] * min(workload.concurrency, 2 * workload.samples)
        self.steps: list[Judging] = []
        self.calls: list[tuple[float, float]] = []

    def submit(self, started: float, ended: float) -> None:
        """Judge the samples of the next step, which were generated from ``started`` to ``ended``."""
        load, free = self._workload, self._free
        draws = load.draws(len(self.steps))
        if load.arrival == "end":
            arrivals: Sequence[float] = [ended] * len(draws)
        else:
            pace = (ended - started) / len(draws)
            arrivals = [started + pace * (i + 1) for i in range(len(draws))]
        earliest = self.steps[-1].end if load.one_batch_at_a_time and self.steps else 0.0
        begins, ends = [], []
        for arrival, seconds in zip(arrivals, draws, strict=True):
            begin = max(arrival, free[0], earliest)
            heapq.heapreplace(free, begin + seconds)
            begins.append(begin)
            ends.append(begin + seconds)
        size = load.responses
        groups = sorted(max(ends[i : i + size]) for i in range(0, len(ends), size))
        ready = [groups[math.ceil(load.batch * (i + 1) / load.mini_batches) - 1] for i in range(load.mini_batches)]
        if len(self.steps) < SHOWN_STEPS:
            self.calls += zip(begins, ends, strict=True)
        self.steps.append(Judging(min(begins), max(ends), sum(draws), max(draws), ready))


def draw_timeline(runs: Sequence[Run], path: Path) -> None:
    """Draw the first steps of some runs into a PNG, one run below the other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError(
            "drawing a timeline needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    shown_as = {
        "generate": ("#4c78a8", "generation"),
        "prepare": ("#72b7b2", "log-probabilities"),
        "train": ("#54a24b", "training"),
        "wait": ("#e45756", "waits for rewards"),
    }
    figure = Figure(figsize=(12, 0.6 + 2.0 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    shown = min(SHOWN_STEPS, *(run.workload.steps for run in runs))
    parts = [[part for part in run.parts if part.step < shown] for run in runs]
    end = max((part.end for some in parts for part in some), default=1.0)
    for axis, run, some in zip(axes, runs, parts, strict=True):
        for part in some:
            axis.broken_barh([(part.start, part.end - part.start)], (1.1, 0.8), color=shown_as[part.kind][0])
            if part.kind == "generate":
                axis.text((part.start + part.end) / 2, 1.5, str(part.step), ha="center", va="center", fontsize=8)
        times, counts = _in_flight(run.calls)
        most = max(counts, default=0) or 1
        axis.fill_between(times, [count / most for count in counts], step="post", color="#f58518", alpha=0.6)
        axis.set_yticks([0.5, 1.5], [f"judging (of {most})", "trainer"])
        axis.set_ylim(0, 2)
        axis.set_xlim(0, end)
        axis.set_title(f"{run.mode}: {run.step_seconds:.0f} s per step", loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colour, label=label) for colour, label in shown_as.values()],
        loc="outside upper right",
        ncols=4,
        fontsize=8,
    )
    figure.savefig(path, dpi=120, format="png")


def _in_flight(calls: Sequence[tuple[float, float]]) -> tuple[list[float], list[int]]:
    events = sorted([(start, 1) for start, _ in calls] + [(end, -1) for _, end in calls])
    times, counts, now = [0.0], [0], 0
    for time, change in events:
        now += change
        times.append(time)
        counts.append(now)
    return times, counts


def with_concurrency(workload: Workload, mode: str) -> list[tuple[int, float]]:
    """Return pairs of concurrency and step time for some higher concurrencies, in ascending order."""
    enough = enough_concurrency(workload)
    higher = {workload.concurrency * factor for factor in (1, 2, 4)} | {enough}
    chosen = sorted(value for value in higher if workload.concurrency <= value)
    return [(value, simulate(replace(workload, concurrency=value), mode).step_seconds) for value in chosen]
