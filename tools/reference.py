"""Writes the reference of the commands, the options and the public Python names into the pages of docs/.

    python -m tools.reference

A page has marks, between which this program writes: ``<!-- begin commands -->``, for a group of options ``<!-- begin
options reward_loop.retry -->``, and for a class or function ``<!-- begin api reward_loop.client.Judge -->``. Names are
read from the source files, so nothing is imported for them.

It also writes the defaults of options into ``reward_loop_options.yaml``, between ``# begin options reward_loop`` and
``# end options reward_loop``. This is a file because verl's command must not import this package unless a run uses it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from pydantic.fields import FieldInfo

from reward_loop.config import (
    BatchConfig,
    BudgetConfig,
    Config,
    GroupConfig,
    HealthConfig,
    LimitConfig,
    RecordConfig,
    RetryConfig,
    RewardLoopConfig,
    RewardModelConfig,
)

ROOT = Path(__file__).resolve().parents[1]

YAML = ROOT / "reward_loop" / "verl" / "config" / "reward_loop_options.yaml"

MARKED_YAML = re.compile(r"( *)(# begin options ([\w.]+)\n).*?( *# end options \3\n)", re.DOTALL)

MARKED = re.compile(
    r"(<!-- begin (api [\w.]+|commands|environment|moved keys|options [\w.]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL
)

GROUPS: dict[str, type[Config]] = {
    "reward_loop": RewardLoopConfig,
    "reward_loop.batch": BatchConfig,
    "reward_loop.budget": BudgetConfig,
    "reward_loop.group": GroupConfig,
    "reward_loop.health": HealthConfig,
    "reward_loop.limits.NAME": LimitConfig,
    "reward_loop.record": RecordConfig,
    "reward_loop.retry": RetryConfig,
    "reward_model.server": RewardModelConfig,
}
_OF_A_RUN = ("log_dir",)
"""Options with another default in a run of verl, which the YAML file has before its mark."""

_OF_VERL = (
    "environment",
    "moved keys",
    "options trainer.v1.reward_pipeline",
    "options trainer.v1.sampler",
    "options trainer.v1.separate_async.reward_queue",
)
"""The parts that are made with verl."""

_SECTIONS = {"Args": "Arguments", "Raises": "Raises", "Returns": "Returns", "Yields": "Yields"}
_CALLED = ("__call__",)
"""The methods with a special name that have a section."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def updated(page: str) -> str:
    """Return a page with the present reference between its marks."""
    return MARKED.sub(lambda found: f"{found[1]}{_reference(found[2])}\n{found[3]}", page)


def _reference(what: str) -> str:
    kind, _, name = what.partition(" ")
    if kind == "commands":
        return commands()
    if kind == "api":
        return _object(name)
    return _of_verl(what) if what in _OF_VERL else _options(_group_of(name), name)


def needs_verl(page: str) -> bool:
    """Return whether a page has a part that is made with verl."""
    return any(found[2] in _OF_VERL for found in MARKED.finditer(page))


# --- Commands


def commands() -> str:
    """Return a section for each command: its help, its usage and its options."""
    from reward_loop.cli import app

    group = typer.main.get_command(app)
    parts: list[str] = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## {name}", _help(command.help), f"```text\nreward-loop {name} {usage}\n```"]
        # Arguments come before options; sorting is stable.
        shown = sorted(command.params, key=lambda parameter: parameter.param_type_name != "argument")
        rows = [_row(parameter) for parameter in shown if not parameter.hidden]
        parts.append(_table(("Option", "Default", "Meaning"), *rows))
    return "\n\n".join(parts)


def _row(parameter: Any) -> tuple[str, str, str]:
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
    meaning = re.sub(r"\s+", " ", _help(getattr(parameter, "help", None)))
    return names, shown, meaning.replace("|", "\\|")


def _help(help_text: str | None) -> str:
    """Return a help text as Markdown: without the colours of rich, with indented examples as code."""
    text = re.sub(r"\[cyan\](.*?)\[/\w*\]", r"`\1`", inspect.cleandoc(help_text or ""))
    text = re.sub(r"(?<!\\)\[/?(bold|dim|italic|green|red|yellow|magenta|blue)?\]", "", text)
    text = text.replace("\\[", "[").replace("\f", "").replace("\b", "")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_example(part) if part.startswith("  ") else part for part in paragraphs)


def _example(paragraph: str) -> str:
    return "```text\n" + inspect.cleandoc("\n" + paragraph).replace("`", "") + "\n```"


# --- Options


def _options(config: type[Config], group: str) -> str:
    """Return the options of a group as a table, each with the docstring beneath it."""
    rows = []
    for name, field in _fields_of(config):
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else f"`{_yaml(default)}`"
        rows.append((f"`{group}.{name}`", shown, _one_line(field.description or "")))
    return _table(("Option", "Default", "Meaning"), *rows)


def _fields_of(config: type[Config]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the options of a group with their names, those that other modules declare last."""
    modules = [cls.__module__ for cls in config.__mro__]
    homes = {name: cls.__module__ for cls in config.__mro__ for name in inspect.get_annotations(cls)}
    yield from sorted(config.model_fields.items(), key=lambda option: modules.index(homes[option[0]]))


def updated_yaml(text: str) -> str:
    """Return the YAML file with the present defaults between its marks."""
    return MARKED_YAML.sub(lambda found: f"{found[1]}{found[2]}{_defaults(found[3], found[1])}{found[4]}", text)


def _defaults(group: str, indent: str) -> str:
    """Return the options of a group with their defaults as YAML, each below the first sentence of its docstring."""
    return "".join(_yaml_lines(_group_of(group)(), indent))


def _yaml_lines(config: Config, indent: str) -> Iterator[str]:
    for name, field in _fields_of(type(config)):
        if name in _OF_A_RUN:
            continue
        sentence = re.split(r"(?<=\.) ", _one_line(field.description or "").replace("`", ""))[0]
        yield from (f"{indent}# {line}\n" for line in textwrap.wrap(sentence, 118 - len(indent)))
        value = getattr(config, name)
        if isinstance(value, Config):
            yield f"{indent}{name}:\n"
            yield from _yaml_lines(value, f"{indent}  ")
        else:  # JSON is also YAML
            yield f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}\n"


def _yaml(value: Any) -> str:
    return {None: "null"}.get(value, str(value)) if not isinstance(value, dict) else json.dumps(value)


def _of_verl(what: str) -> str:
    """Return a table of the integration with verl."""
    from examples.verl_cpu import ENVIRONMENT
    from reward_loop.verl.options import MOVED

    if what == "environment":
        return _table(("Variable", "Value"), *((f"`{name}`", f"`{value}`") for name, value in ENVIRONMENT.items()))
    if what == "moved keys":
        return _table(("You write", "It becomes"), *((f"`{old}`", f"`{new}`") for old, new in MOVED.items()))
    group = what.removeprefix("options ")
    return _options(_group_of(group), group)


def _group_of(name: str) -> type[Config]:
    if not name.startswith("trainer."):
        return GROUPS[name]
    from reward_loop.verl.options import PipelineOptions, RewardQueueOptions, SamplerOptions

    of_verl = {"reward_pipeline": PipelineOptions, "reward_queue": RewardQueueOptions, "sampler": SamplerOptions}
    return of_verl[name.rpartition(".")[2]]


def _table(*rows: tuple[str, ...]) -> str:
    """Return a table; the first row is its head."""
    head, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *others))


# --- Python names


def _object(path: str) -> str:
    module, _, name = path.rpartition(".")
    found, tree = find(module, name)
    if isinstance(found, ast.ClassDef):
        heading, *parts = _class(found, tree)
    elif isinstance(found, ast.Assign | ast.AnnAssign):
        after = tree.body[tree.body.index(found) + 1 :][:1]
        text = [_one_line(str(one.value.value)) for one in after if _is_text(one)]
        heading, *parts = [f"## {name}", _code(ast.unparse(found)), *text]
    else:
        heading, *parts = _function(found, name, "##")
    is_root = f"from {module} import {name} as" in (ROOT / "reward_loop" / "__init__.pyi").read_text()
    return "\n\n".join([heading, f"`from {'reward_loop' if is_root else module} import {name}`", *parts])


def find(module: str, name: str) -> tuple[Definition | ast.Assign | ast.AnnAssign, ast.Module]:
    """Return the definition of a name, and the module that contains it.

    Raises:
        KeyError: the module has no such name.
    """
    tree = _parse(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node, tree
        if isinstance(node, ast.Assign | ast.AnnAssign) and _assigned(node) == name:
            return node, tree
    for node in ast.walk(tree):  # a module may import a name for type checkers only, and on first use
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return find(node.module or "", name)
    raise KeyError(f"{module} has no {name}")


def _assigned(node: ast.Assign | ast.AnnAssign) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else None


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _parse(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    stub = path / "__init__.pyi"  # of a package that imports its names on first use
    file = (stub if stub.exists() else path / "__init__.py") if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _class(node: ast.ClassDef, tree: ast.Module) -> Iterator[str]:
    members = list(_members(node, tree))
    methods = [member for member in members if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = next((method for method in methods if method.name == "__init__"), None)
    yield f"## {node.name}"
    bases = [ast.unparse(base) for base in node.bases]
    yield _code(f"class {node.name}" + (f"({', '.join(bases)})" if bases else ""))
    yield _docstring(node)
    if made is not None:
        yield _code(_signature(made, node.name))
        yield _docstring(made)
    fields = [*_fields(members), *(_property(method) for method in methods if _is_property(method))]
    if fields:
        yield "**Attributes**\n\n" + "\n".join(fields)
    for method in methods:
        is_public = not method.name.startswith("_") or method.name in _CALLED
        if is_public and not _is_property(method) and not _decorators(method) & {"overload"}:
            yield from _function(method, f"{node.name}.{method.name}", "###")


def _members(node: ast.ClassDef, tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a class, and those of its bases in this library that it does not override."""
    yield from node.body[1:] if _is_text(node.body[0]) else node.body
    own = {statement.name for statement in node.body if isinstance(statement, Definition)}
    for base in node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        try:
            found, where = _find_in(tree, ast.unparse(base))
        except KeyError:  # of another library
            continue
        if isinstance(found, ast.ClassDef) and found.name not in _documented():
            for statement in _members(found, where):
                if not (isinstance(statement, Definition) and statement.name in own):
                    yield statement


def _find_in(tree: ast.Module, name: str) -> tuple[Definition, ast.Module]:
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node, tree
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reward_loop"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module or "", alias.name)
    raise KeyError(name)


def _documented() -> set[str]:
    """Return the names of the classes and functions that have a section of their own."""
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("api*.md"))
    return {path.rpartition(".")[2] for path in re.findall(r"<!-- begin api ([\w.]+) -->", text)}


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, level: str) -> Iterator[str]:
    yield f"{level} `{name}`" if "." in name else f"{level} {name}"
    yield _code(_signature(node, name.rpartition(".")[2]))
    yield _docstring(node)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return the signature, in several lines if it is long."""
    arguments = node.args
    first = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(first) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_argument(argument, default) for argument, default in zip(first, defaults, strict=True)]
    if first and first[0].arg in ("self", "cls"):
        shown = shown[1:]
    if arguments.vararg is not None:
        shown.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(_argument(argument, value))
    if arguments.kwarg is not None:
        shown.append("**" + _argument(arguments.kwarg, None))
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({', '.join(shown)}){returns}"
    if len(line) <= 100:
        return line
    return f"{prefix}{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    if default is None:
        return text
    value = "..." if ast.unparse(default).startswith("_") else ast.unparse(default)
    return f"{text}{' = ' if argument.annotation is not None else '='}{value}"


def _fields(members: list[ast.stmt]) -> Iterator[str]:
    """Yield a line for each field of a class that has a docstring."""
    for statement, following in pairwise([*members, None]):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        name = _assigned(statement)
        if name is None or name.startswith("_") or name == "model_config":
            continue
        kind = f" (`{ast.unparse(statement.annotation)}`)" if isinstance(statement, ast.AnnAssign) else ""
        meaning = f": {_one_line(ast.literal_eval(following.value))}" if _is_text(following) else ""
        yield f"- `{name}`{kind}{meaning}"


def _property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "" if method.returns is None else f" (`{ast.unparse(method.returns)}`)"
    return f"- `{method.name}`{kind}: {_one_line(ast.get_docstring(method) or '')}"


def _is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return bool(_decorators(method) & {"property", "functools.cached_property"}) and not method.name.startswith("_")


def _decorators(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in method.decorator_list}


def _docstring(node: Definition) -> str:
    """Return a docstring as Markdown: its sections are lists, its examples are code."""
    parts: list[str] = []
    for block in re.split(r"\n\n(?=\S)", ast.get_docstring(node) or ""):
        title, _, rest = block.partition("\n")
        if title.rstrip(":") in _SECTIONS and title.endswith(":"):
            parts += [f"**{_SECTIONS[title.rstrip(':')]}**", _items(textwrap.dedent(rest))]
        elif re.fullmatch(r"Examples?::?", title):
            parts += ["**Example**", _code(textwrap.dedent(rest).strip())]
        else:
            parts.append(re.sub(r"::$", ":", _plain(block), flags=re.MULTILINE))
    return "\n\n".join(parts)


def _items(text: str) -> str:
    """Return the items of a section, ``name: meaning``, as a list; other text unchanged."""
    if not re.match(r"[\w*, |`]+:\s", text):
        return _plain(text)
    items = re.split(r"\n(?=\S)", text)
    return "\n".join(re.sub(r"^([\w*, |]+):", r"- `\1`:", _one_line(item)) for item in items)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", _plain(text)).strip()


def _plain(text: str) -> str:
    """Return a docstring's text as Markdown: without the roles of reStructuredText."""
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=`)", "", text))


def _code(text: str) -> str:
    return f"```py\n{text}\n```"


def main() -> None:
    """Rewrite all pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        page = path.read_text()
        if (new := updated(page)) != page:
            path.write_text(new)
            print(path.relative_to(ROOT))
    if (new := updated_yaml(text := YAML.read_text())) != text:
        YAML.write_text(new)
        print(YAML.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
