"""The command ``reward-loop simulate``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer
from rich.table import Table

from reward_loop._util.standard_streams import console, print_line

__all__ = ["simulate"]


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
    # Imported here to keep the start of the other commands fast.
    from reward_loop.agent import simulation
    from reward_loop.agent.schedule import MODES

    load = simulation.Workload(
        batch=batch,
        responses=responses,
        judge=simulation.parse_latency(judge),
        concurrency=concurrency,
        generation=generation,
        training=training,
        prepare=prepare,
        mini_batches=mini_batches,
        steps=steps,
        seed=seed,
    )
    runs = [simulation.simulate(load, name) for name in (MODES if mode == "all" else [mode])]
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
    enough = simulation.enough_concurrency(load)
    if enough > concurrency:
        out.print(
            f"Judging bounds the step. From about {enough} at a time, it takes no longer than generation and training."
        )
    else:
        out.print("Generation and training bound the step: more concurrency brings little.")
