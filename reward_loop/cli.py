"""The command ``reward-loop``: registers the sub-commands, prints errors and sets the exit status."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from reward_loop import __version__
from reward_loop._util import signals
from reward_loop._util.output import open_standard_streams
from reward_loop.adapters.service.command import serve
from reward_loop.agent.command import simulate
from reward_loop.check.command import command as check
from reward_loop.errors import ConfigError, FunctionLoadError, RewardLoopError
from reward_loop.limits.command import limits
from reward_loop.offline.command import score
from reward_loop.offline.compare_command import compare
from reward_loop.records.command import stuck
from reward_loop.records.report_command import report
from reward_loop.router.command import route
from reward_loop.view.command import view
from reward_loop.view.trace_command import trace

__all__ = ["app", "main"]

_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True)


class _Commands(TyperGroup):
    """Prints errors as one message without a traceback, and sets the exit status.

    The exit status is 2 for wrong usage (an invalid option, file or function), 1 if the command failed, and 130 after
    Ctrl-C.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _report("\n[yellow]Interrupted.[/]", error)
            raise typer.Exit(130) from None
        except (RewardLoopError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader closed the pipe, as `| head` does
            _report(f"[bold red]error:[/] {escape(str(error))}", error)
            raise typer.Exit(2 if isinstance(error, ConfigError | FunctionLoadError) else 1) from None


def _report(text: str, error: BaseException) -> None:
    for line in (text, *map(escape, getattr(error, "__notes__", ()))):
        _err.print(line, highlight=False)


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


def main() -> None:
    """Run the command."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Errors quote model output, which may contain lone surrogates and characters that a terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    signals.handle()
    try:
        app()
    except OSError as error:  # raised by --version and --help, which print before a command is invoked
        _report(f"[bold red]error:[/] {escape(str(error))}", error)
        raise SystemExit(1) from None


def _version(asked: bool) -> None:
    if asked:
        _out.print(f"reward-loop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Rewards that never block RL training of language models."""


app.command("check")(check)
app.command()(score)
app.command()(route)
app.command()(serve)
app.command()(report)
app.command()(compare)
app.command()(view)
app.command()(trace)
app.command()(stuck)
app.command()(limits)
app.command()(simulate)
