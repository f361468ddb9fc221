"""The command ``reward-loop simulate``: a training run with a virtual clock, and the step time in each mode."""

from __future__ import annotations

import heapq
import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from reward_loop._util.standard_streams import console, print_line
from reward_loop.agent.schedule import MODES, Generate, Prepare, Schedule, Wait
from reward_loop.errors import ConfigError

__all__ = ["Judging", "Latency", "Run", "Workload", "enough_concurrency", "parse_latency", "run_mode", "simulate"]

_FORMS = "uniform:LOW:HIGH, constant:SECONDS, lognormal:MEDIAN:SIGMA, exponential:MEAN, file:PATH"

LONGEST_S = 1e9
"""The longest judging time allowed, in seconds; keeps sums finite."""

WIDEST = 10.0
"""The largest sigma allowed for a lognormal distribution; its mean is median * exp(sigma**2 / 2)."""


def simulate(
    batch: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 1024,
    responses: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 5,
    judge: Annotated[
        str,
        typer.Option(
            metavar="DISTRIBUTION",
            help="Seconds of judging per response: uniform:LOW:HIGH, constant:X, lognormal:MEDIAN:SIGMA, "
            "exponential:MEAN, or file:PATH (JSONL with measured latencies, such as the records of "
            "[cyan]reward-loop score[/]).",
        ),
    ] = "uniform:1:40",
    concurrency: Annotated[int, typer.Option(min=1, help="Responses that are judged concurrently.")] = 256,
    generation: Annotated[float, typer.Option(min=0, help="Seconds of generation per step.")] = 103,
    training: Annotated[float, typer.Option(min=0, help="Seconds of updates per step.")] = 100,
    prepare: Annotated[
        float,
        typer.Option(min=0, help="Seconds of old and reference log-probabilities per step, in addition to training."),
    ] = 0,
    mini_batches: Annotated[int, typer.Option(min=1, help="Updates per step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the simulated run.")] = 100,
    mode: Annotated[
        Literal["baseline", "mini-batch", "off-policy", "both", "all"], typer.Option(help="The simulated mode.")
    ] = "all",
    seed: Annotated[int, typer.Option(help="Seed of the judging times.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate how much overlapping judging with training would shorten a step.

    Prints for each mode the length of a step, its floor, the time that the
    trainer waits for rewards, and the share of judging that is hidden behind
    generation and training.
    """
    load = Workload(
        batch=batch,
        responses=responses,
        judge=parse_latency(judge),
        concurrency=concurrency,
        generation=generation,
        training=training,
        prepare=prepare,
        mini_batches=mini_batches,
        steps=steps,
        seed=seed,
    )
    runs = [run_mode(load, name) for name in (MODES if mode == "all" else [mode])]
    if as_json:
        figures = [
            {
                "mode": run.mode,
                "step_s": run.step_seconds,
                "floor_s": run.floor,
                "over_floor": run.over_floor,
                "waiting_s": run.waiting,
                "hidden_share": run.hidden,
            }
            for run in runs
        ]
        print_line(json.dumps(figures))
        return
    out = console()
    table = Table("mode", box=None, pad_edge=False)
    for column in ("s a step", "floor", "over floor", "waits for rewards", "judging hidden"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.mode,
            f"{run.step_seconds:.1f}",
            f"{run.floor:.1f}",
            f"{run.over_floor:.1%}",
            f"{run.waiting:.1f} s",
            f"{run.hidden:.0%}",
        )
    out.print(table)
    out.print(
        f"\nG + T = {load.gpu_seconds:.1f} s; R = {runs[0].judge_seconds:.1f} s, {load.samples} responses of "
        f"{load.judge.mean:.3g} s with {concurrency} at a time."
    )
    enough = enough_concurrency(load)
    if enough > concurrency:
        out.print(
            f"Judging bounds the step. From about {enough} at a time, it takes no longer than generation and training."
        )
    else:
        out.print("Generation and training bound the step: more concurrency brings little.")


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of judging times."""

    name: str
    mean: float
    """In seconds."""
    draw: Callable[[random.Random], float]


def parse_latency(text: str) -> Latency:
    """Read ``uniform:1:40``, ``constant:2``, ``lognormal:3:0.8``, ``exponential:5`` or ``file:latencies.jsonl``.

    A file has a number in each line, or an object with ``seconds``, ``latency``, ``reward_seconds`` or ``work_s``, as
    records have; the simulation draws from these numbers.

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
                f"{path}, line {number}: expected seconds, or an object with seconds, latency, reward_seconds or work_s"
            )
        values.append(seconds)
    if not values:
        raise ConfigError(f"{path} contains no latencies")
    return values


def _seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return next((value[key] for key in ("seconds", "latency", "reward_seconds", "work_s") if key in value), None)
    return None if isinstance(value, bool) else value


@dataclass(frozen=True)
class Workload:
    """The parts of a training step. Times are in seconds.

    Samples reach the judge one after the other during generation, as in verl's agent loop.
    """

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
class Judging:
    """The judging of one step. All are seconds, or times on the virtual clock."""

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
    waits: list[tuple[float, float]]
    """Start and end of each time in which the trainer waited for rewards."""
    judging: list[Judging]
    """For each step."""

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
        return sum(end - start for start, end in self.waits) / self.workload.steps

    @property
    def hidden(self) -> float:
        """The hidden share of judging: of the time in which samples of a step were judged, the share in which the
        trainer did not wait."""
        total = sum(step.end - step.start for step in self.judging)
        waited = sum(
            max(0.0, min(step.end, end) - max(step.start, start)) for step in self.judging for start, end in self.waits
        )
        return 1.0 - waited / total if total else 1.0

    @property
    def judge_seconds(self) -> float:
        """The judging time of a step at full concurrency, if judges are always busy; the mean over all steps."""
        return sum(step.seconds for step in self.judging) / self.workload.concurrency / self.workload.steps

    @property
    def floor(self) -> float:
        """The lower bound for the step time in this mode with these judging times, in seconds.

        With generation G, training T and all judging at full concurrency R, it is max(G + T, R) with both overlaps, or
        off-policy alone. Otherwise the judging of a step must end before its training, or before the last part of it.
        """
        load = self.workload
        schedule = Schedule.of_mode(self.mode, load.mini_batches)
        if schedule.one_step_off_policy:
            return max(load.gpu_seconds, self.judge_seconds)
        floors = []
        for step in self.judging:
            seconds = max(step.seconds / load.concurrency, step.longest)
            if schedule.mini_batch_pipeline:
                floors.append(max(load.gpu_seconds, seconds + load.training / load.mini_batches))
            else:
                floors.append(max(load.generation, seconds) + load.prepare + load.training)
        return sum(floors) / len(floors)


def run_mode(workload: Workload, mode: str) -> Run:
    """Simulate a workload in one of the `MODES`."""
    schedule = Schedule.of_mode(mode, workload.mini_batches)
    # The judges take samples in order of arrival. A later sample never delays an earlier one, so the judging of a step
    # is fixed when its samples are submitted. At most two steps are in flight: more judges than that have no effect.
    free = [0.0] * min(workload.concurrency, 2 * workload.samples)
    judging: list[Judging] = []
    waits: list[tuple[float, float]] = []
    now = 0.0

    def ready(step: int) -> int:
        return bisect_right(judging[step].ready, now)

    for action in schedule.actions(workload.steps, ready):
        started = now
        if isinstance(action, Generate):
            now += workload.generation
            judging.append(_judge(workload, action.step, free, started))
        elif isinstance(action, Prepare):
            now += workload.prepare
        elif isinstance(action, Wait):
            now = max(now, judging[action.step].ready[action.mini_batches - 1])
            waits.append((started, now))
        else:
            now += workload.training * action.count / workload.mini_batches
    return Run(mode, workload, now, waits, judging)


def _judge(load: Workload, step: int, free: list[float], started: float) -> Judging:
    """Judge the samples of a step that was generated from ``started`` on; ``free``: a heap of when judges are free."""
    draws = load.draws(step)
    pace = load.generation / len(draws)
    begins, ends = [], []
    for i, seconds in enumerate(draws):
        begin = max(started + pace * (i + 1), free[0])
        heapq.heapreplace(free, begin + seconds)
        begins.append(begin)
        ends.append(begin + seconds)
    size = load.responses
    groups = sorted(max(ends[i : i + size]) for i in range(0, len(ends), size))
    ready = [groups[math.ceil(load.batch * (i + 1) / load.mini_batches) - 1] for i in range(load.mini_batches)]
    return Judging(min(begins), max(ends), sum(draws), max(draws), ready)


def enough_concurrency(workload: Workload) -> int:
    """Return the concurrency at which judging takes no longer than generation and training."""
    if workload.gpu_seconds == 0:
        return workload.samples
    return max(1, min(workload.samples, math.ceil(workload.samples * workload.judge.mean / workload.gpu_seconds)))
