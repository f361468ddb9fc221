"""Converts a call of TRL, which has one list for each column, to samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.scoring.forms import content_of
from reward_loop.types import RewardSample

__all__ = ["Columns", "group_sizes", "text_of"]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column of the data set becomes which part of a sample. All other columns become keys of ``extra_info``.

    A name may be a dotted path into a column of mappings, such as ``reward_model.ground_truth``.
    """

    ground_truth: str | None = None
    """The column of the reference answers; by default ``ground_truth``, if there is one."""
    data_source: str | None = None
    """The column of the names of the data sets; by default ``data_source``, if there is one."""
    extra_info: str | None = None
    """A column of mappings, whose keys become keys of ``extra_info``; by default ``extra_info``, if there is one."""
    max_completion_length: int | None = None
    """The largest number of tokens of a completion."""

    def check(self, columns: Mapping[str, Sequence[Any]], count: int, requires: frozenset[str]) -> None:
        """Check that the columns fit the options and the function.

        Args:
            columns: the columns of the data set, each with a value for each completion.
            count: the number of completions.
            requires: the parts of a sample that the function requires.

        Raises:
            ConfigError: a column does not exist, or has another length.
        """
        for name, values in columns.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
                raise ConfigError(f"column {name!r} must be a list with {count} values; got {shorten(values, 60)}")
        if "validate" in requires and "validate" not in columns:
            raise ConfigError(
                "the reward function requires validate, and TRL does not pass whether it evaluates: add a column "
                "`validate` to both data sets, False in that of the training and True in that of the evaluation"
            )
        for part in ("ground_truth", "data_source", "extra_info"):
            named: str | None = getattr(self, part)
            name = named or part
            found = name in columns or name.partition(".")[0] in columns
            if not found and (named is not None or (part in requires and part != "extra_info")):
                needs = f"{part}={named!r}" if named else f"the reward function, which requires {part}"
                raise ConfigError(
                    f"the data set has no column {name!r} for {needs}{did_you_mean(name, columns) or '.'} Its columns "
                    f"are {listing(columns)}: name the right one by {part}=..."
                )

    def samples(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
        step: int | None,
        progress: float | None = None,
    ) -> list[RewardSample]:
        """Return a sample for each completion. A sample whose columns have wrong values has an error.

        Args:
            prompts: text, or chat messages; one for each completion.
            completions: text, or the messages that the model wrote.
            completion_ids: the tokens of each completion.
            columns: the columns of the data set.
            step: the training step.
            progress: the share of the run that is done.
        """
        samples = []
        for index, completion in enumerate(completions):
            parts = self._parts({name: values[index] for name, values in columns.items()})
            if not isinstance(completion, str) and len(completion) > 1:
                parts["extra_info"] = {"completion": completion, **parts["extra_info"]}
            ids = None if completion_ids is None else completion_ids[index]
            longest = self.max_completion_length
            samples.append(
                RewardSample(
                    text_of(completion),
                    prompt=prompts[index],
                    step=step,
                    training_progress=progress,
                    response_ids=ids,
                    response_length=None if ids is None else len(ids),
                    is_truncated=None if ids is None or longest is None else len(ids) >= longest,
                    validate=bool(columns["validate"][index]) if "validate" in columns else None,
                    **parts,
                )
            )
        return samples

    def _parts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return ground truth, data source and extra info of one completion, as arguments of `RewardSample`."""
        used = {name: getattr(self, name) or name for name in ("ground_truth", "data_source", "extra_info")}
        truth = look_up(row, used["ground_truth"])
        source = look_up(row, used["data_source"])
        nested = look_up(row, used["extra_info"])
        extra_info = {name: value for name, value in row.items() if name not in used.values()}
        error = None
        if isinstance(nested, Mapping):
            extra_info |= nested
        elif nested is not MISSING and nested is not None:
            error = f"its column {used['extra_info']!r} must be a mapping; got {shorten(nested, 60)}"
        for part, value in (("ground_truth", truth), ("data_source", source)):
            if value is MISSING and getattr(self, part) is not None:
                error = f"its column has no {getattr(self, part)!r}, which {part}= names"
        return {
            "ground_truth": None if truth is MISSING else truth,
            "data_source": "" if source is MISSING or source is None else str(source),
            "extra_info": extra_info,
            "error": error,
        }


def text_of(completion: Any) -> str:
    """Return the text of a completion: the text itself, or the contents of the assistant's messages, one a line."""
    if isinstance(completion, str):
        return completion
    return "\n".join(filter(None, (content_of(message) for message in completion if message["role"] == "assistant")))


def group_sizes(prompts: Sequence[Any], size: int | None, *, exact: bool) -> list[int]:
    """Return the sizes of the groups of a batch: neighbours with the same prompt are a group.

    Args:
        prompts: the prompt of each completion.
        size: the size of each group; ``None`` if only the prompts tell groups apart.
        exact: whether an incomplete group is an error.

    Raises:
        ConfigError: a group is incomplete, and groups must be complete.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(prompts)]
    if size is None:
        return runs
    if exact and (broken := [run for run in runs if run % size]):
        raise ConfigError(
            f"the reward manager needs whole groups of group_size={size}, and this process has {broken[0]} completions "
            "of a prompt. Set group_size to num_generations, let num_generations divide the batch of each process "
            "(per_device_train_batch_size * steps_per_generation), and set num_generations_eval to the same number"
        )
    return [min(size, run - start) for run in runs for start in range(0, run, size)]
