"""The command ``reward-loop simulate``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from reward_loop._util.console import console
from reward_loop._util.output import print_line
from reward_loop.errors import ConfigError

if TYPE_CHECKING:
    from reward_loop.agent.capacity import PartLoad, RunSize
    from reward_loop.agent.simulation import Run

__all__ = ["simulate"]

_SIZE = "Size of the run, with --nodes"


def simulate(
    context: typer.Context,
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
    mode: Annotated[
        Literal["baseline", "mini-batch", "off-policy", "both", "all"], typer.Option(help="The simulated mode.")
    ] = "all",
    arrival: Annotated[
        Literal["end", "during"],
        typer.Option(help="Samples reach the judge at the end of generation (end), or during it (during)."),
    ] = "end",
    one_batch_at_a_time: Annotated[
        bool, typer.Option("--one-batch-at-a-time", help="Judge a batch only after the previous one is complete.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the judging times.")] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the first steps into this PNG (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead of a step, compute how busy each part of the library is in a run on this many nodes.",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    node_rate: Annotated[
        float,
        typer.Option(
            help="Samples that a node generates per second. 16 is 8 GPUs with 4,000 tokens per second each, and "
            "responses of 2,000 tokens.",
            rich_help_panel=_SIZE,
        ),
    ] = 16,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples without a reward. Default: samples per second x mean judging time (--judge).",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per response.", rich_help_panel=_SIZE)] = 2000,
    requests: Annotated[
        float, typer.Option(help="Requests to a judge per sample; 0 without a judge.", rich_help_panel=_SIZE)
    ] = 1,
    function_ms: Annotated[
        float,
        typer.Option(
            help="CPU time of your function per sample on a reward worker's event loop, in milliseconds.",
            rich_help_panel=_SIZE,
        ),
    ] = 0,
    agent_workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Agent loop workers: actor_rollout_ref.rollout.agent.num_workers of verl.",
            rich_help_panel=_SIZE,
        ),
    ] = 8,
    workers: Annotated[
        int, typer.Option(min=1, help="Reward workers: reward.num_workers of verl.", rich_help_panel=_SIZE)
    ] = 8,
    routers: Annotated[int, typer.Option(min=1, help="Routers in front of the judges.", rich_help_panel=_SIZE)] = 1,
) -> None:
    """Simulate how much overlapping judging with training would shorten a step.

    Prints for each mode the length of a step, its floor, the time that the
    trainer waits for rewards, and the share of judging that is hidden behind
    generation and training.

    With --nodes, it prints instead how busy each part of the library is in a
    run of that size, and at how many nodes the part reaches its capacity; the
    first line is the part that does so first. The costs are measured ones
    (docs/scale.md; [cyan]python -m benchmarks.scale[/] measures them again).
    """
    # Imported here to keep the start of the other commands fast.
    from reward_loop.agent import capacity, simulation
    from reward_loop.agent.latency import parse_latency
    from reward_loop.agent.schedule import MODES

    _check_options(context, sized=nodes is not None)
    if nodes is not None:
        judged = nodes * node_rate * parse_latency(judge).mean
        size = capacity.RunSize(
            nodes=nodes,
            node_rate=node_rate,
            in_flight=in_flight or (max(1, math.ceil(judged)) if math.isfinite(judged) else 1),
            tokens=tokens,
            requests=requests,
            function_ms=function_ms,
            agent_workers=agent_workers,
            workers=workers,
            routers=routers,
        )
        _print_size(size, as_json=as_json)
        return
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
        arrival=arrival,
        one_batch_at_a_time=one_batch_at_a_time,
    )
    runs = [simulation.simulate(load, name) for name in (MODES if mode == "all" else [mode])]
    if timeline is not None:
        simulation.draw_timeline(runs, timeline)
    if as_json:
        print_line(json.dumps([_run_json(run) for run in runs]))
        return
    out = console()
    table = _table("mode", "s a step", "floor", "over floor", "waits for rewards", "judging hidden")
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
        higher = ", ".join(
            f"{seconds:.1f} s with {value}" for value, seconds in simulation.with_concurrency(load, runs[-1].mode)
        )
        out.print(
            f"Judging bounds the step. In mode {runs[-1].mode}: {higher}. From about {enough} at a time, judging "
            "takes no longer than generation and training."
        )
    else:
        out.print("Generation and training bound the step: more concurrency brings little.")
    if timeline is not None:
        out.print(f"timeline: {escape(str(timeline))}")


def _check_options(context: typer.Context, *, sized: bool) -> None:
    """Reject options on the command line that have no effect there.

    Raises:
        ConfigError: an option of the size of a run without ``--nodes``, or an option of a step with it.
    """
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in ("as_json", "judge", "nodes"):
            continue
        of_size = getattr(option, "rich_help_panel", None) == _SIZE
        if of_size and not sized:
            raise ConfigError(f"{option.opts[0]} needs --nodes: it belongs to the size of a run")
        if sized and not of_size:
            raise ConfigError(f"{option.opts[0]} has no effect with --nodes, which simulates no step")


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "mode": run.mode,
        "step_s": run.step_seconds,
        "floor_s": run.floor,
        "over_floor": run.over_floor,
        "waiting_s": run.waiting,
        "hidden_share": run.hidden,
    }


def _print_size(size: RunSize, *, as_json: bool) -> None:
    """Print the load of each part in a run of this size."""
    from reward_loop.agent import capacity

    loads = capacity.part_loads(size)
    if as_json:
        run = {"samples_per_s": size.rate, "in_flight": size.in_flight, "seconds_in_flight": size.seconds_in_flight}
        parts = [_load_json(load, size) for load in loads]
        print_line(json.dumps({**run, "parts": parts, "costs": capacity.SOURCE}))
        return
    out = console()
    out.print(
        f"{size.nodes} nodes x {size.node_rate:g} samples/s = {size.rate:,.0f} samples/s. {size.in_flight:,} samples "
        f"in flight, {size.seconds_in_flight:.1f} s each.\n"
    )
    table = _table("part", "load", "capacity", "", "used", "full at")
    for load in loads:
        table.add_row(
            load.part,
            f"{load.load:,.{2 if load.unit == 'cores' else 0}f}",
            f"{load.capacity:,.0f}",
            load.unit,
            f"{load.used:.0%}",
            f"{load.full_at(size):,.0f} nodes",
        )
    out.print(table)
    out.print(f"\nFull first: {loads[0].part}.")
    for load in loads:
        if load.used > capacity.BUSY:
            out.print(f"{load.part} ({load.used:.0%}): {load.remedy}.")
    out.print(f"Costs: {capacity.SOURCE}.")


def _load_json(load: PartLoad, size: RunSize) -> dict[str, Any]:
    return {
        "part": load.part,
        "unit": load.unit,
        "load": load.load,
        "capacity": load.capacity,
        "used_share": load.used,
        "full_at_nodes": load.full_at(size),
        "remedy": load.remedy,
    }


def _table(first: str, *columns: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table
