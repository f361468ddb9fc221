"""The command ``reward-loop``: registers the sub-commands, prints errors and sets the exit status."""

from __future__ import annotations

import errno
import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

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
        given = list(sys.argv[1:] if args is None else args)
        try:
            # `obj`: messages name an option as it was typed.
            status = super().main(given, standalone_mode=False, obj=given, **options)
        except Exception as error:
            # The classes of typer's errors are public only in part, and their module depends on the release of typer.
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            _exit_with_usage(error, given)
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
            command = self.commands.get(ctx.invoked_subcommand or "")
            # Each line of a message may name an option.
            text = re.sub(
                r"^--[\w-]+", lambda option: _as_typed([option[0]], command, ctx.obj), str(error), flags=re.MULTILINE
            )
            _report(f"[bold red]error:[/] {escape(text)}", error)
            raise typer.Exit(2 if isinstance(error, ConfigError | FunctionLoadError) else 1) from None


def _report(text: str, error: BaseException) -> None:
    for line in (text, *map(escape, getattr(error, "__notes__", ()))):
        _err.print(line)


def _exit_with_usage(error: Any, arguments: Sequence[str]) -> NoReturn:
    """Print an error of typer in the style of all other errors, and exit with its status."""
    message = error.format_message()
    message = message[:1].lower() + message[1:]
    if message:  # empty without arguments: typer has printed the help
        hint = getattr(error, "param_hint", None)
        options = [hint] if isinstance(hint, str) else getattr(getattr(error, "param", None), "opts", None)
        context = getattr(error, "ctx", None)
        if options and error.message:
            command = None if context is None else context.command
            message = f"{_as_typed(options, command, arguments)}: {error.message.removeprefix('Value error, ')}"
        _err.print(f"[bold red]error:[/] {escape(message)}")
        if context is not None:
            _err.print(f"Help: {escape(context.command_path)} --help")
    sys.exit(error.exit_code)


def _as_typed(options: Sequence[str], command: Any, arguments: Sequence[str]) -> str:
    """Return an option as it was typed, such as ``-f`` for ``--field``; for an argument, its name in the help."""
    for parameter in () if command is None else command.params:
        if set(options) & set(parameter.opts):
            options = parameter.opts
            if parameter.param_type_name == "argument":
                return str(parameter.metavar or options[0].upper())
    for argument in arguments:
        for option in options:
            is_short = option.startswith("-") and not option.startswith("--")
            if argument.partition("=")[0] == option or (is_short and argument.startswith(option)):
                return option
    return options[0]


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
