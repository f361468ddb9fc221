"""The command ``reward-loop simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop.errors import ConfigError

__all__ = ["simulate"]


def simulate(
    batch: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 1024,
    responses: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 5,
    judge: Annotated[
        str,
        typer.Option(
            metavar="DISTRIBUTION",
            help="Seconds of judging per response: uniform:LOW:HIGH, constant:X, lognormal:MEDIAN:SIGMA, "
            "exponential:MEAN, or file:PATH (JSONL with measured latencies, such as the output of "
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
    mode: Annotated[str, typer.Option(help="Mode: baseline, mini-batch, off-policy, both, or all.")] = "all",
    arrival: Annotated[
        str, typer.Option(help="Samples reach the judge at the end of generation (end), or during it (during).")
    ] = "end",
    one_batch_at_a_time: Annotated[
        bool, typer.Option("--one-batch-at-a-time", help="Judge a batch only after the previous one is complete.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the judging times.")] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the first steps into this PNG (needs matplotlib).")
    ] = None,
) -> None:
    """Simulate how much overlapping judging with training would shorten a step.

    Prints for each mode the length of a step, its floor, the time that the
    trainer waits for rewards, and the share of judging that is hidden behind
    generation and training.
    """
    # Imported here to keep the start of the other commands fast.
    from reward_loop.agent import simulation
    from reward_loop.agent.latency import parse_latency
    from reward_loop.agent.schedule import MODES

    if arrival not in ("end", "during"):
        raise ConfigError(f"--arrival: expected end or during, got {arrival!r}")
    load = simulation.Workload(
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
        arrival="end" if arrival == "end" else "during",
        one_batch_at_a_time=one_batch_at_a_time,
    )
    runs = [simulation.simulate(load, name) for name in (MODES if mode == "all" else [mode])]
    out = Console(soft_wrap=True)
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
    out.print(table, highlight=False)
    judging = sum(runs[0].judge_seconds) / steps / concurrency
    out.print(
        f"\nG + T = {load.gpu_seconds:.1f} s; R = {judging:.1f} s, {load.samples} responses of "
        f"{load.judge.mean:.3g} s with {concurrency} at a time.",
        highlight=False,
    )
    enough = simulation.enough_concurrency(load)
    if enough > concurrency:
        higher = ", ".join(
            f"{seconds:.1f} s with {value}" for value, seconds in simulation.with_concurrency(load, runs[-1].mode)
        )
        out.print(
            f"Judging bounds the step. In mode {runs[-1].mode}: {higher}. From about {enough} at a time, judging "
            "takes no longer than generation and training.",
            highlight=False,
        )
    else:
        out.print("Generation and training bound the step: more concurrency brings little.", highlight=False)
    if timeline is not None:
        simulation.draw_timeline(runs, timeline)
        out.print(f"timeline: {escape(str(timeline))}", highlight=False)
