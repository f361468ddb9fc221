"""Command-line options that several commands share."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reward_loop.config import RewardLoopConfig, parse

Function = Annotated[
    str,
    typer.Argument(
        metavar="FUNCTION",
        help="The reward function: [cyan]file.py:name[/], [cyan]package.module:name[/] or a ready judge such as "
        "[cyan]judge:rubric[/].",
        show_default=False,
    ),
]
Rollouts = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The rollouts: JSONL, parquet by its suffix, or a folder of records.",
        show_default=False,
    ),
]
FieldPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        "-f",
        metavar="PART=PATH",
        help="The field of a row that contains a part of the sample, e.g. [cyan]solution_str=output[/] or, nested, "
        "[cyan]ground_truth=reward_model.ground_truth[/]. Parts: solution_str, ground_truth, data_source, "
        "extra_info, extra_info.KEY, prompt, response_ids, response_length, is_truncated, step, training_progress, "
        "validate, group. Default: the field with the name of the part. Repeatable.",
    ),
]
RewardKwargs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="An argument of the function; the value is JSON or plain text. Repeatable."
    ),
]
Manager = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The reward manager: batch, dapo, group, naive, prime, rate_limited, remote, or an import path.",
    ),
]
RouterAddress = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Passed to the function as [cyan]reward_router_address[/].")
]
Timeout = Annotated[
    float, typer.Option(min=0, help="Time limit of the function for a row, in seconds; 0 for no limit.")
]
Isolation = Annotated[
    Literal["thread", "process"],
    typer.Option(help="Where a sync function runs. A process can be killed, and crashes alone."),
]
MoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-O",
        metavar="NAME=VALUE",
        help="Another option of the reward loop, e.g. [cyan]limits.judge.max_concurrent=8[/] or "
        "[cyan]retry.max_attempts=1[/]; the value is JSON or plain text. Repeatable.",
    ),
]


def pairs(items: Sequence[str] | None, option: str) -> dict[str, str]:
    """Parse the values of a repeatable option of the form ``NAME=VALUE``.

    Raises:
        typer.BadParameter: an item is not of this form, or a name is repeated; the message names ``option``.
    """
    found: dict[str, str] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise typer.BadParameter(f"expected NAME=VALUE, got {item!r}", param_hint=option)
        if key in found:
            raise typer.BadParameter(f"{key} is given twice: {found[key]!r} and {value!r}", param_hint=option)
        found[key] = value
    return found


def values(items: Sequence[str] | None, option: str) -> dict[str, Any]:
    """Parse the values of an option as `pairs` does, where a value is JSON or plain text."""
    return {name: json_or_text(value) for name, value in pairs(items, option).items()}


def more_options(context: typer.Context, items: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of the reward loop that ``--option`` sets, as nested dicts: names are dotted.

    Raises:
        typer.BadParameter: an item is malformed, one name is the prefix of another (``limits`` and ``limits.judge``),
            or an option of the command with this name is given, too, such as ``--timeout 10 -O timeout=5``.
    """
    found: dict[str, Any] = {}
    options = values(items, "--option")
    for path, value in options.items():
        if any(other.startswith(f"{path}.") for other in options):
            raise typer.BadParameter(f"{path} contradicts another option: remove one of them", param_hint="--option")
        source = context.get_parameter_source(path)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{path.replace('_', '-')}"
            message = f"{flag}={context.params[path]} and -O {path}={value} set the same option: give one of them"
            raise typer.BadParameter(message, param_hint=flag)
        *groups, name = path.split(".")
        functools.reduce(lambda group, part: group.setdefault(part, {}), groups, found)[name] = value
    return found


def config(context: typer.Context, items: Sequence[str] | None, given: Mapping[str, Any]) -> RewardLoopConfig:
    """Return the options of the reward loop: those that are given, and those that ``--option`` sets."""
    return parse(RewardLoopConfig, {**given, **more_options(context, items)}, lambda path: f"-O {path}")


def json_or_text(value: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(value)
    except ValueError:
        return value
