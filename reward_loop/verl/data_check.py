"""Reads the first rows of the data of a run as a reward function gets them, for ``reward_loop.check=True``."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from reward_loop._util.text import counted, did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.managers.composite import names_for
from reward_loop.scoring import load_function
from reward_loop.scoring.signature import Target, declared
from reward_loop.verl.compat import uses
from reward_loop.verl.settings import RewardSettings

uses(__name__, "verl.utils.reward_score", "default_compute_score(data_source, solution_str, ground_truth)")

ROWS = 8
"""The number of rows of each file that are read."""

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
"""The suffixes that verl's data set accepts -> the loader of ``datasets``."""

_DEFAULT_REQUIRES = frozenset({"data_source", "ground_truth"})
"""What verl's own functions require."""


_ADDED = {"num_turns", "rollout_reward_scores"}
"""The keys of ``extra_info`` that the manager adds to each row."""


def check_data(settings: RewardSettings, say: Callable[[str], None]) -> None:
    """Open the files of the training and of the validation, and compare their first rows with what the function takes.

    Files on remote file systems, and those of a data set class of the user's own, are not opened. If verl's functions
    score by ``data_source``, all rows are read, and an unknown source is an error.

    Args:
        settings: the settings of rewards.
        say: called with a line about each file, and with what may be wrong.

    Raises:
        ConfigError: a file does not exist or cannot be read, or rows lack what the run needs; all problems are listed.
    """
    data = settings.config.data
    if (data.get("custom_cls") or {}).get("path"):
        say(f"The data is not checked: data.custom_cls.path={data.custom_cls.path} reads it.")
        return
    found = list(_functions(settings))
    problems: list[str] = []
    for option, phase in (("data.train_files", "train"), ("data.val_files", "validate")):
        functions = {name: function for name, function, of in found if of in (None, phase)}
        for file in _files(data.get(option.removeprefix("data."))):
            if "://" in file:
                say(f"{option}={file} is not opened: it is on a remote file system.")
                continue
            say(f"Reading {option}={file}.")
            try:
                problems += _problems(f"{option}={file}", file, data, functions, settings, say)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _files(given: Any) -> list[str]:
    if given is None:
        return []
    return [str(file) for file in given] if isinstance(given, list | ListConfig) else [str(given)]


def _functions(settings: RewardSettings) -> Iterator[tuple[str, Target | None, str | None]]:
    """Yield the functions of a run: name, target (``None`` for those of verl by data source), and phase, if only one.

    Components that score only some data sources are not included: which rows they score depends on the others.
    """
    if settings.scores_by_model:
        return
    components = settings.options.components
    for key, component in components.items():
        if component.path and component.data_sources is None:
            function = load_function(component.path, component.name)
            yield f"reward_loop.components.{key}", declared(function, component.reward_kwargs), component.phase
    if settings.function is not None:
        name = f"{settings.function.path}:{settings.function.name or ''}".rstrip(":")
        yield name, declared(settings.function.load(), settings.function.kwargs), None
    elif not settings.manager.is_import_path and not (components and all(one.path for one in components.values())):
        yield "verl's function for the data source", None, None


def _problems(
    what: str,
    file: str,
    data: DictConfig,
    functions: Mapping[str, Target | None],
    settings: RewardSettings,
    say: Callable[[str], None],
) -> Iterator[str]:
    rows = _rows(what, file)
    first = list(islice(rows, ROWS))
    if not first:
        yield f"{what} has no rows"
        return
    prompt = data.get("prompt_key", "prompt")
    for index, row in enumerate(first):
        if (problem := _problem_of_row(row, prompt)) is not None:
            yield f"{what}, row {index}: {problem}"
            return

    @functools.cache
    def sources() -> list[str]:
        # Of all rows, and read once: several checks need them, and the file may have millions of rows.
        return sorted({str(row.get("data_source", "")) for row in [*first, *rows]})

    if settings.manager.name == "composite":
        validate = what.startswith("data.val_files")
        lost = [one for one in sources() if not names_for(settings.options.components, one, validate)]
        if lost:
            yield (
                f"{what}: none of reward_loop.components scores {counted(len(lost), 'data source')}: "
                f"{listing(map(repr, lost))}. Add a component, or one with data_sources=others"
            )
    for name, function in functions.items():
        requires = _DEFAULT_REQUIRES if function is None else function.requires
        for index, row in enumerate(first):
            if missing := [_MISSING[one] for one in sorted(requires & _MISSING.keys()) if not _has(row, one)]:
                yield f"{what}, row {index}: {name} requires {listing(missing)}. The row has {listing(row)}"
                break
        else:
            if function is not None and (keys := _keys_read(function.origin)):
                lacking = {key for row in first for key in keys - (row.get("extra_info") or {}).keys() - _ADDED}
                if lacking:
                    say(f"Note: {name} reads extra_info[...] of {listing(lacking)}, which rows of {file} lack.")
            elif function is None:
                yield from _unknown_sources(what, sources())


_MISSING = {"data_source": "the column data_source", "ground_truth": "reward_model.ground_truth"}
"""What a function can require of a row -> its place in the row."""


def _has(row: Mapping[str, Any], name: str) -> bool:
    return "data_source" in row if name == "data_source" else "ground_truth" in (row.get("reward_model") or {})


def _problem_of_row(row: Mapping[str, Any], prompt: str) -> str | None:
    if prompt not in row:
        similar = did_you_mean(prompt, row) or "."
        return f"no column {prompt!r} with the prompt{similar} Set data.prompt_key. The row has {listing(row)}"
    for name in ("reward_model", "extra_info"):
        if not isinstance(row.get(name) or {}, Mapping):
            return f"the column {name} must be an object with named fields, not {shorten(row[name], 60)}"
    return None


def _rows(what: str, file: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as verl's data set reads them.

    Raises:
        ConfigError: the file does not exist, has another format, or cannot be read.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        near = [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
        raise ConfigError(f"{what}: no such file{did_you_mean(path.name, near)}")
    loader = _FORMATS.get(path.suffix)
    if loader is None:
        raise ConfigError(f"{what}: verl reads files that end in {listing(_FORMATS)}")
    import datasets

    try:
        # Streamed: without that, the whole file would be read and copied to the cache.
        yield from datasets.load_dataset(loader, data_files=str(path), split="train", streaming=True)
    except StopIteration:  # an empty file
        return
    except Exception as error:  # of pyarrow, pandas or datasets: they have no common class
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        raise ConfigError(f"{what} cannot be read as {loader}: {type(error).__name__}: {cause}") from error


def _unknown_sources(what: str, sources: Sequence[str]) -> Iterator[str]:
    from verl.utils.reward_score import default_compute_score

    unknown = []
    for source in sources:
        try:
            default_compute_score(source, "", "")
        except NotImplementedError:
            unknown.append(source)
        except Exception:  # it has a function, which cannot read the empty reference answer
            continue
    if unknown:
        yield (
            f"{what}: verl has no function for {counted(len(unknown), 'data source')}: {listing(map(repr, unknown))}. "
            "Set reward.custom_reward_function.path to a file with a function for them"
        )


def _keys_read(function: Any) -> set[str]:
    """Return the keys that a function reads as ``extra_info["key"]``, as far as its source shows them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "compute_score", function))))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == "extra_info"
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
