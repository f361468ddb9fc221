"""Hooks of MkDocs (``mkdocs.yml``): they write the reference of the command line from the commands themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of a page by the reference of all commands."""
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """Return a section for each command: its help, its usage and its options."""
    from reward_loop.cli import app

    group = typer.main.get_command(app)
    parts: list[str] = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## {name}", _text(command.help), f"```text\nreward-loop {name} {usage}\n```"]
        # Arguments come before options; sorting is stable.
        shown = sorted(command.params, key=lambda parameter: parameter.param_type_name != "argument")
        rows = [_row(parameter) for parameter in shown if not parameter.hidden]
        parts.append("\n".join(["| Option | Default | Meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    if isinstance(getattr(parameter, "show_default", None), str):
        shown = parameter.show_default
    elif parameter.required:
        shown = "required"
    else:
        shown = (
            "" if default in (None, False, (), []) or callable(default) else f"`{getattr(default, 'value', default)}`"
        )
    meaning = re.sub(r"\s+", " ", _text(getattr(parameter, "help", None)))
    return f"| {names} | {shown} | {meaning.replace('|', chr(92) + '|')} |"


def _text(help_text: str | None) -> str:
    """Return a help text as Markdown: without the colours of rich, with indented examples as code."""
    text = re.sub(r"\[cyan\](.*?)\[/\w*\]", r"`\1`", inspect.cleandoc(help_text or ""))
    text = re.sub(r"(?<!\\)\[/?(bold|dim|italic|green|red|yellow|magenta|blue)?\]", "", text)
    text = text.replace("\\[", "[").replace("\f", "").replace("\b", "")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_example(part) if part.startswith("  ") else part for part in paragraphs)


def _example(paragraph: str) -> str:
    return "```text\n" + inspect.cleandoc("\n" + paragraph).replace("`", "") + "\n```"
