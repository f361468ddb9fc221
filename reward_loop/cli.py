"""The command ``reward-loop``: registers the sub-commands, prints errors and sets the exit status."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from reward_loop import __version__
from reward_loop._util import process, signals
from reward_loop._util.standard_streams import console
from reward_loop.adapters.serve import serve
from reward_loop.errors import ConfigError, FunctionLoadError, RewardLoopError
from reward_loop.offline.audit import audit
from reward_loop.offline.check import check_command
from reward_loop.offline.report_command import report
from reward_loop.offline.score import score
from reward_loop.view.command import view

_out, _err = console(), console(stderr=True)


class _Commands(TyperGroup):
    """Prints errors as one message without a traceback, and sets the exit status.

    The exit status is 2 for wrong usage (an invalid option, file or function), 1 if the command failed, and 130 after
    Ctrl-C.
    """

    def main(self, args: Any = None, *, standalone_mode: bool = True, **options: Any) -> Any:  # type: ignore[override]
        """Run the command, and exit with its status; without ``standalone_mode``, raise the errors of typer."""
        try:
            status = super().main(args, standalone_mode=False, **options)
        except Exception as error:
            # The classes of typer's errors are public only in part, and their module depends on the release of typer.
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            # Empty without arguments: typer has printed the help.
            if message := error.format_message().replace("Value error, ", ""):
                _err.print(f"[bold red]error:[/] {escape(message[:1].lower() + message[1:])}")
            sys.exit(getattr(error, "exit_code", 2))
        if not standalone_mode:
            return status
        sys.exit(status if isinstance(status, int) else 0)

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
        _err.print(line)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Errors quote model output, which may contain lone surrogates and characters that a terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    signals.handle()
    process.raise_gc_threshold()
    try:
        app()
    except KeyboardInterrupt as error:  # before a command is invoked
        _report("\n[yellow]Interrupted.[/]", error)
        raise SystemExit(130) from None
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


for command in (audit, check_command, score, serve, report, view):
    app.command(command.__name__.removesuffix("_command"))(command)
