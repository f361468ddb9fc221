"""A reward manager as a reward function of TRL's trainers, which pass one list for each column."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Self

from reward_loop import managers
from reward_loop._util.event_loops import in_background
from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.agent import RewardAgent
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.managers.failures import Failures
from reward_loop.managers.scorer import Scorer, load_scorer, scores_groups
from reward_loop.scoring import ScoringFunction, load_function
from reward_loop.scoring.signature import resolve
from reward_loop.types import Outcome, RewardResult, RewardSample, missing, progress_of


@dataclass(frozen=True, slots=True)
class Columns:
    """Makes samples of what TRL passes. All columns but three are keys of ``extra_info``."""

    ground_truth: str | None = None
    """The column of the reference answers, or a dotted path into a column of mappings, such as
    ``reward_model.ground_truth``; by default ``ground_truth``, if there is one."""
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
        needed = sorted(requires & {"ground_truth", "data_source", "validate"})
        if self.ground_truth is not None:
            needed = [self.ground_truth, *(name for name in needed if name != "ground_truth")]
        for name in needed:
            if name not in columns and name.partition(".")[0] not in columns:
                raise ConfigError(
                    f"the data set has no column {name!r}, which is required{did_you_mean(name, columns) or '.'} Its "
                    f"columns are {listing(columns)}: rename one, or name that of the reference by ground_truth=..."
                )

    def samples(
        self,
        given: Mapping[str, Any],
        columns: Mapping[str, Sequence[Any]],
        requires: frozenset[str] = frozenset(),
    ) -> list[RewardSample]:
        """Return a sample for each completion. A sample whose columns have wrong values has an error.

        Functions with ``**kwargs`` also get what TRL passes to its own functions, in lists of one completion.

        Args:
            given: what TRL passes beside the columns: ``trainer_state``, and lists with an item for each completion.
            columns: the columns of the data set.
            requires: the parts of a sample that the function requires.
        """
        state, ids_of = given.get("trainer_state"), given.get("completion_ids")
        # TRL counts the steps that have ended; this reward is for the next one.
        step = None if state is None else state.global_step + 1
        samples = []
        for index, completion in enumerate(given["completions"]):
            row = {name: values[index] for name, values in columns.items()}
            parts = self._parts(row, requires)
            if not isinstance(completion, str) and len(completion) > 1:
                parts["extra_info"] = {"completion": completion, **parts["extra_info"]}
            ids = None if ids_of is None else ids_of[index]
            longest = self.max_completion_length
            passed = {name: [values[index]] for name, values in given.items() if name != "trainer_state"}
            samples.append(
                RewardSample(
                    text_of(completion),
                    prompt=given["prompts"][index],
                    step=step,
                    training_progress=progress_of(step, getattr(state, "max_steps", None)),
                    response_ids=ids,
                    response_length=None if ids is None else len(ids),
                    is_truncated=None if ids is None or longest is None else len(ids) >= longest,
                    validate=bool(row["validate"]) if "validate" in row else None,
                    kwargs=passed if state is None else {**passed, "trainer_state": state},
                    **parts,
                )
            )
        return samples

    def _parts(self, row: Mapping[str, Any], requires: frozenset[str]) -> dict[str, Any]:
        """Return ground truth, data source and extra info of one completion, as arguments of `RewardSample`."""
        path = self.ground_truth or "ground_truth"
        truth, source, nested = look_up(row, path), row.get("data_source"), row.get("extra_info")
        extra_info = {name: value for name, value in row.items() if name not in (path, "data_source", "extra_info")}
        error = None
        if isinstance(nested, Mapping):
            extra_info |= nested
        elif not missing(nested):
            error = f"its column 'extra_info' must be a mapping; got {shorten(nested, 60)}"
        if truth is MISSING and self.ground_truth is not None:
            error = f"its column has no {path!r}, which ground_truth= names"
        if missing(source) and "data_source" in requires:
            error = "its column 'data_source' has no value, and the function requires data_source"
        return {
            "ground_truth": None if truth is MISSING else truth,
            "data_source": "" if missing(source) else str(source),
            "extra_info": extra_info,
            "error": error,
        }


def text_of(completion: Any) -> str:
    """Return the text of a completion: the text itself, or the contents of the assistant's messages, one a line."""
    if isinstance(completion, str):
        return completion
    return "\n".join(filter(None, (content_of(message) for message in completion if message["role"] == "assistant")))


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


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


logger = logging.getLogger(__name__)


def reward_function(
    function: Any,
    *,
    manager: str = "naive",
    options: RewardLoopConfig | Mapping[str, Any] | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    ground_truth: str | None = None,
    group_size: int | None = None,
    max_completion_length: int | None = None,
    concurrency: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> TRLReward:
    """Return an object for the argument ``reward_funcs`` of TRL's trainers.

    Args:
        function: a reward function in any form that `ScoringFunction` accepts; or its name, ``file.py:name`` or
            ``package.module:name``.
        manager: the name or the import path of the manager that calls the function.
        options: the options of the manager: a `RewardLoopConfig`, or a mapping of its fields.
        reward_kwargs: configured arguments of the function.
        reward_router_address: ``host:port`` that the function receives.
        reward_model_tokenizer: the reward model's tokenizer, which the function receives.
        ground_truth: the column of the reference answers, or a dotted path such as ``reward_model.ground_truth``. By
            default ``ground_truth``, if the data set has it.
        group_size: ``num_generations`` of the trainer. By default, neighbours with equal prompts are a group. Required
            for managers that need whole groups, if several processes train.
        max_completion_length: that of the trainer, for functions that take ``is_truncated``: completions of this length
            count as cut off.
        concurrency: how many samples are scored at a time; ``None`` for no limit.
        log_dir: the folder of the records, which ``reward-loop view`` shows; the same as the option ``log_dir``.
        name: the name in TRL's metrics; by default the function's name.

    Raises:
        ConfigError: an option is invalid, or a limit is smaller than the number of processes.
        FunctionLoadError: the function cannot be loaded.

    Example::

        with reward_function(compute_score, ground_truth="answer", log_dir="rewards") as reward:
            GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset).train()
    """
    if group_size is not None and group_size < 1:
        raise ConfigError(f"group_size: at least 1, the num_generations of the trainer; got {group_size}")
    parsed = parse(RewardLoopConfig, options, "options")
    if log_dir is not None:
        parsed = parsed.model_copy(update={"log_dir": os.fspath(log_dir)})
    parsed = share_of(parsed, _processes())
    # Mistakes are found here, before the training: a worker that unpickles the result loads the function again.
    kind = getattr(managers.get(manager), "function_type", ScoringFunction)
    loaded = load_function(function) if isinstance(function, str) else function
    requires = resolve(loaded, reward_kwargs, of_lists=kind.of_lists).requires
    if max_completion_length is None and "is_truncated" in requires:
        raise ConfigError(
            "the reward function requires is_truncated, and TRL does not pass whether a completion was cut off: set "
            "max_completion_length to that of the trainer"
        )
    load = partial(
        load_scorer,
        function,
        manager,
        parsed,
        reward_kwargs=reward_kwargs,
        router_address=reward_router_address,
        reward_model_tokenizer=reward_model_tokenizer,
    )
    columns = Columns(ground_truth, max_completion_length)
    return TRLReward(
        name or str(getattr(loaded, "__name__", type(loaded).__name__)), load, columns, group_size, concurrency
    )


def share_of(options: RewardLoopConfig, processes: int) -> RewardLoopConfig:
    """Return the options of one of several training processes, each of which gets an equal share of limits and budget.

    Raises:
        ConfigError: a limit is smaller than the number of processes.
    """
    if processes == 1:
        return options
    shared = options.model_dump()
    budget = shared["budget"]
    for limit in shared["limits"].values():
        limit["share"] /= processes
    for group in (*shared["models"].values(), budget):
        for name in ("max_concurrent", "max_tokens"):
            if group.get(name) is not None:
                group[name] //= processes
    if budget["max_cost"] is not None:
        budget["max_cost"] /= processes
    return parse(RewardLoopConfig, shared, f"options of each of {processes} processes")


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


class _Scoring:
    """A function with its manager, and their agent on an event loop of its own.

    TRL calls reward functions from several event loops, and closes some of them after each batch.
    """

    def __init__(self, scorer: Scorer, concurrency: int | None) -> None:
        self.manager, self.requires = scorer.manager, scorer.requires
        self.needs_group = scores_groups(scorer.manager)
        """Whether the manager, or ``post_process_scores`` of the function, compares the samples of a group."""
        self._name = secrets.token_hex(4)
        """Part of the names of samples: several processes may record samples in one folder."""
        self._batches = itertools.count(1)
        self._running = in_background(
            partial(RewardAgent, scorer.manager, concurrency=concurrency), name="reward-agent"
        )
        self._agent = self._running.__enter__()

    async def score(self, samples: Sequence[RewardSample], groups: Sequence[int]) -> list[RewardResult]:
        """Return the results of samples, in order. If the caller is cancelled, so are the samples."""
        batch = f"{self._name}.{next(self._batches)}"
        named = [replace(sample, uid=f"{batch}.{index}") for index, sample in enumerate(samples)]

        async def scored() -> list[RewardResult]:
            pending = self._agent.submit(named, groups=groups)
            try:
                return await pending.results()
            except asyncio.CancelledError:
                pending.cancel()  # a cancelled `await` alone does not cancel the batch
                raise

        assert self._agent.loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scored(), self._agent.loop))

    def close(self) -> None:
        self._running.__exit__(None, None, None)


class TRLReward:
    """An async reward function of TRL's trainers, which `reward_function` creates.

    Each process that uses it has one manager, which the first call creates, and `close` or the end of a ``with`` block
    closes. Calls may come from several event loops. Pickling it leaves the manager behind.

    Args:
        name: the name in TRL's metrics.
        load: loads the function and its manager.
        columns: the columns that become parts of a sample.
        group_size, concurrency: see `reward_function`.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Scorer],
        columns: Columns,
        group_size: int | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.__name__ = name
        self._columns = columns
        self._group_size = group_size
        self._load = load
        self._concurrency = concurrency
        # By process: a fork copies this object, but not the agent's thread.
        self._running: dict[int, _Scoring] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has no agent yet.
        return type(self), (self.__name__, self._load, self._columns, self._group_size, self._concurrency)

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        log_extra: Any = None,
        log_metric: Any = None,
        environments: Sequence[Any] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return a reward for each completion; ``None`` for masked samples. TRL calls this.

        Raises:
            ConfigError: the columns do not fit the options, or a group is incomplete.
            ScoringError: a sample has no score, and the policy is ``raise``.
            TooManyFailuresError: the share of failed samples among the recent samples is too large.
        """
        # The first call starts it, in a thread: loading a function may take seconds.
        agent = self._running.get(os.getpid())
        if agent is None:
            agent = await asyncio.to_thread(self._start)
        self._columns.check(columns, len(prompts), agent.requires)
        if agent.needs_group and self._group_size is None and _processes() > 1:
            raise ConfigError(
                "several processes train, and the reward manager or post_process_scores needs whole groups: set "
                "group_size=num_generations, so that incomplete groups are found"
            )
        groups = group_sizes(prompts, self._group_size, exact=agent.needs_group)
        given = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "environments": environments,
            "trainer_state": trainer_state,
        }
        given = {name: values for name, values in given.items() if values is not None}
        samples = self._columns.samples(given, columns, agent.requires)
        results = await agent.score(samples, groups)
        if log_metric is not None:
            for name, value in metrics_of(self.__name__, results).items():
                log_metric(name, value)
        folder = getattr(getattr(agent.manager, "options", None), "log_dir", None)  # a manager of the user has none
        if line := Failures.of(results).line(None if folder is None else f"reward-loop view {folder}"):
            step = samples[0].step
            logger.warning("%s%s: %s", self.__name__, "" if step is None else f", step {step}", line)
        return [result.reward for result in results]

    def close(self) -> None:
        """Cancel what runs, and close the manager; blocks until that is done. A later call creates a new manager."""
        # First removed: a call during `close`, which takes a while, must not get the agent that is being closed.
        if (agent := self._running.pop(os.getpid(), None)) is not None:
            agent.close()

    def _start(self) -> _Scoring:
        with self._lock:
            if (agent := self._running.get(os.getpid())) is None:
                agent = self._running[os.getpid()] = _Scoring(self._load(), self._concurrency)
            return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics_of(name: str, results: Sequence[RewardResult]) -> dict[str, float]:
    """Return the metrics of a batch: the number of samples by outcome, mean seconds, and the mean components.

    Args:
        name: the name of the reward function.
        results: the results of the batch.
    """
    outcomes = Counter(result.outcome for result in results)
    group = f"reward_loop/{name}"
    metrics: dict[str, float] = {f"{group}/{outcome}": outcomes[outcome] for outcome in Outcome}
    metrics[f"{group}/masked"] = sum(result.masked for result in results)
    if measured := [result.work_s for result in results if result.total_s]:  # not by a manager written for verl
        metrics[f"{group}/work_s"] = fmean(measured)
    components = [result.components for result in results]
    for key in dict.fromkeys(key for found in components for key in found):
        metrics[f"reward_components/{name}/{key}"] = fmean(found[key] for found in components if key in found)
    return metrics
