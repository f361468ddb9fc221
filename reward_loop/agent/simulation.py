"""A discrete simulation of training steps on a virtual clock, and the command ``reward-loop simulate``."""

from __future__ import annotations

import heapq
import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from reward_loop._util.standard_streams import console, print_line
from reward_loop.agent.schedule import MODES, Generate, Prepare, Schedule, Wait
from reward_loop.errors import ConfigError
from reward_loop.records.reader import RecordsReader

__all__ = ["Latency", "Run", "Workload", "parse_latency", "run_mode", "simulate"]

_FORMS = "uniform:LOW:HIGH, constant:SECONDS, lognormal:MEDIAN:SIGMA, file:PATH"

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
            "or file:PATH (measured seconds: a number in each line, or a folder or file of records).",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Simulate how much overlapping judging with training would shorten a step.

    Prints for each mode the length of a step, its floor, and the time that the
    trainer waits for rewards.
    """
    load = Workload(
        batch, responses, parse_latency(judge), concurrency, generation, training, prepare, mini_batches, steps
    )
    runs = [run_mode(load, mode) for mode in MODES]
    if as_json:
        print_line(json.dumps([asdict(run) for run in runs]))
        return
    out = console()
    table = Table("mode", box=None, pad_edge=False)
    for column in ("s a step", "floor", "over floor", "waits for rewards"):
        table.add_column(column, justify="right")
    for run in runs:
        figures = f"{run.step_s:.1f}", f"{run.floor_s:.1f}", f"{run.over_floor:.1%}", f"{run.waiting_s:.1f} s"
        table.add_row(run.mode, *figures)
    out.print(table)
    out.print(
        f"\nG + T = {load.gpu_seconds:.1f} s; R = {load.judge_seconds:.1f} s, {load.samples} responses of "
        f"{load.judge.mean:.3g} s with {concurrency} at a time."
    )
    if load.enough_concurrency > concurrency:
        out.print(
            f"Judging bounds the step. From about {load.enough_concurrency} at a time, it takes no longer than "
            "generation and training."
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
    """Read ``uniform:1:40``, ``constant:2``, ``lognormal:3:0.8`` or ``file:latencies.jsonl``.

    The simulation draws from the numbers of a file: one in each line, or the ``work_s`` of each record. A folder is a
    folder of records.

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
    raise ConfigError(
        f"invalid judge latency {text!r}: write one of {_FORMS}; times must be from 0 to {LONGEST_S:g} seconds"
    )


def _read(path: Path) -> list[float]:
    if path.is_dir():
        values = [row["work_s"] for row in RecordsReader(path).rows() if row.get("work_s") is not None]
    else:
        values = _read_file(path)
    if not values:
        raise ConfigError(f"{path} contains no latencies")
    return values


def _read_file(path: Path) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge latencies cannot be read: {error}") from None
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = value["work_s"] if isinstance(value, dict) else value
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            seconds = math.nan
        if not 0 <= seconds <= LONGEST_S:
            raise ConfigError(f"{path}, line {number}: expected seconds, or a record with work_s")
        values.append(seconds)
    return values


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

    def __post_init__(self) -> None:
        if not math.isfinite(self.gpu_seconds):
            raise ConfigError("generation, training, prepare: each a number of seconds")
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

    @property
    def judge_seconds(self) -> float:
        """The expected judging time of a step, with judges that are always busy."""
        return self.samples * self.judge.mean / self.concurrency

    @property
    def enough_concurrency(self) -> int:
        """The concurrency at which judging takes no longer than generation and training."""
        return math.ceil(self.samples * self.judge.mean / self.gpu_seconds) if self.gpu_seconds else self.samples

    def draws(self, step: int) -> list[float]:
        """Return the judging times of a step; they are the same in every mode and every run."""
        rng = random.Random(f"0:{step}")
        draw = self.judge.draw
        return [draw(rng) for _ in range(self.samples)]


@dataclass(frozen=True)
class Run:
    """The figures of a simulated run in one mode."""

    mode: str
    step_s: float
    """The length of the whole run, including its start, divided by the number of steps."""
    floor_s: float
    """The lower bound for a step with these judging times; see `_floor`."""
    over_floor: float
    """How much longer a step is than its floor, as a share of the floor."""
    waiting_s: float
    """Seconds per step in which the trainer waited for rewards."""


def run_mode(load: Workload, mode: str) -> Run:
    """Simulate a workload in one of the `MODES`."""
    schedule = Schedule.of_mode(mode, load.mini_batches)
    # The judges take samples in order of arrival. A later sample never delays an earlier one, so the judging of a step
    # is fixed when its samples are submitted. At most two steps are in flight: more judges than that have no effect.
    free = [0.0] * min(load.concurrency, 2 * load.samples)
    draws = [load.draws(step) for step in range(load.steps)]
    judged: list[list[float]] = []  # for each step, when each mini-batch has all its rewards
    now = waited = 0.0

    def ready(step: int) -> int:
        return bisect_right(judged[step], now)

    for action in schedule.actions(load.steps, ready):
        if isinstance(action, Generate):
            judged.append(_judge(load, draws[action.step], free, now))
            now += load.generation
        elif isinstance(action, Prepare):
            now += load.prepare
        elif isinstance(action, Wait):
            until = max(now, judged[action.step][action.mini_batches - 1])
            waited += until - now
            now = until
        else:
            now += load.training * action.count / load.mini_batches
    step_s, floor_s = now / load.steps, _floor(load, schedule, draws)
    return Run(mode, step_s, floor_s, step_s / floor_s - 1 if floor_s else 0.0, waited / load.steps)


def _judge(load: Workload, draws: list[float], free: list[float], started: float) -> list[float]:
    """Judge the samples of a step; return when each mini-batch has all its rewards.

    Args:
        load: the workload.
        draws: the judging times of the samples.
        free: a heap of the times at which judges are free; it is changed.
        started: when the generation of the samples begins.
    """
    pace = load.generation / len(draws)
    ends = []
    for i, seconds in enumerate(draws):
        ends.append(max(started + pace * (i + 1), free[0]) + seconds)
        heapq.heapreplace(free, ends[-1])
    size = load.responses
    groups = sorted(max(ends[i : i + size]) for i in range(0, len(ends), size))
    return [groups[math.ceil(load.batch * (i + 1) / load.mini_batches) - 1] for i in range(load.mini_batches)]


def _floor(load: Workload, schedule: Schedule, draws: list[list[float]]) -> float:
    """Return the lower bound for the step time in seconds, with these judging times of each step.

    With generation G, training T and all judging at full concurrency R, it is max(G + T, R) with both overlaps, or
    off-policy alone. Otherwise the judging of a step must end before its training, or before the last part of it.
    """
    if schedule.one_step_off_policy:
        return max(load.gpu_seconds, sum(map(sum, draws)) / load.concurrency / load.steps)
    floors = []
    for step in draws:
        judged = max(sum(step) / load.concurrency, max(step))
        if schedule.mini_batch_pipeline:
            floors.append(max(load.gpu_seconds, judged + load.training / load.mini_batches))
        else:
            floors.append(max(load.generation, judged) + load.prepare + load.training)
    return sum(floors) / load.steps
