"""Reward agents for trainers that only take a function, and so have no place that owns an agent.

An `AgentOwner` has one agent for each process, which the first call of the function starts. `process_agent` is the one
agent of the process for slime, ms-swift and verifiers. Its options come from a file, whose path is in the environment
variable ``REWARD_LOOP_CONFIG``, unless the trainer has a place for them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import Field

from reward_loop._util.event_loops import in_background
from reward_loop._util.text import listing, shorten
from reward_loop.agent import RewardAgent
from reward_loop.config import Config, RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import Scorer, load_scorer, scores_groups
from reward_loop.types import Reward, RewardResult, RewardSample


class AgentInThread:
    """A `RewardAgent` on an event loop of its own in a background thread.

    Trainers call from several event loops, and some of them close theirs after each batch.

    Args:
        scorer: the reward manager with its function; the manager is closed with this object.
        concurrency: the largest number of samples that are scored at the same time; ``None`` for no limit.
    """

    def __init__(self, scorer: Scorer, concurrency: int | None = None) -> None:
        self.manager = scorer.manager
        self.requires = scorer.requires
        """The fields of a sample that the function requires."""
        self.needs_group = scores_groups(scorer.manager)
        """Whether the manager, or ``post_process_scores`` of the function, compares the samples of a group."""
        self._name = secrets.token_hex(4)
        """Part of the names of samples: several processes may record samples in one folder."""
        self._batches = itertools.count(1)
        self._stack = ExitStack()
        agent = partial(RewardAgent, self.manager, concurrency=concurrency)
        self._agent = self._stack.enter_context(in_background(agent, name="reward-agent"))
        assert self._agent.loop is not None
        self._loop = self._agent.loop

    async def score(self, samples: Sequence[RewardSample], groups: Sequence[int] | None = None) -> list[RewardResult]:
        """Return the results of samples, in order. If the caller is cancelled, so are the samples.

        Args:
            samples: the samples; members of a group are neighbours. Those without a name get a unique one.
            groups: the size of each group; by default, each sample is a group of its own.

        Raises:
            RewardLoopError: an error that must stop the run, such as too many failures; or this object is closed.
        """
        if self._loop.is_closed():
            raise RewardLoopError("the reward agent is closed")
        batch = f"{self._name}.{next(self._batches)}"
        named = [
            replace(sample, uid=f"{batch}.{index}") if sample.uid is None else sample
            for index, sample in enumerate(samples)
        ]
        scoring = asyncio.run_coroutine_threadsafe(self._score(named, groups), self._loop)
        rewards = await asyncio.wrap_future(scoring)
        return [RewardResult.of(reward, sample.uid) for sample, reward in zip(named, rewards, strict=True)]

    async def _score(self, samples: Sequence[RewardSample], groups: Sequence[int] | None) -> list[Reward]:
        pending = self._agent.submit(samples, groups=groups)
        try:
            return await pending
        except asyncio.CancelledError:
            # A cancelled `await` alone does not cancel the batch.
            pending.cancel()
            raise

    def close(self) -> None:
        """Cancel the samples that have not ended, and stop the agent. Blocks until it has stopped."""
        self._stack.close()


A = TypeVar("A", bound=AgentInThread)


class AgentOwner(Generic[A]):
    """Owns one agent in each process. It ends with `close`, or with the interpreter."""

    def __init__(self) -> None:
        # By process: a fork copies this object, but not the agent's thread, and the copy of a lock may be held.
        self._agents: dict[int, A] = {}
        self._starting: dict[int, threading.Lock] = {}

    def __reduce__(self) -> tuple[type[AgentOwner[A]], tuple[()]]:
        return type(self), ()  # a copy in another process has no agent yet

    async def get(self, start: Callable[[], A]) -> A:
        """Return the agent of this process; the first call starts it.

        Args:
            start: starts the agent. Called in a thread: loading a function may take seconds, which must not block the
                event loop of the trainer. If it raises, the next call of `get` tries again.
        """
        # Without the lock and a thread once the agent runs: trainers call this for each sample.
        agent = self._agents.get(os.getpid())
        return await asyncio.to_thread(self._get, start) if agent is None else agent

    def _get(self, start: Callable[[], A]) -> A:
        pid = os.getpid()
        # `setdefault`, since two threads of a process may be the first.
        with self._starting.setdefault(pid, threading.Lock()):
            if (agent := self._agents.get(pid)) is None:
                agent = self._agents[pid] = start()
            return agent

    def close(self) -> None:
        """Close the agent of this process, if it was started; blocks until that is done. `get` may start another."""
        # First removed: a call during `close`, which takes a while, must not get the agent that is being closed.
        if (agent := self._agents.pop(os.getpid(), None)) is not None:
            agent.close()


ENVIRONMENT = "REWARD_LOOP_CONFIG"
"""The environment variable with the path of the file of options."""

Source = str | Mapping[str, Any] | None
"""Options, or the path of their file; ``None`` for the file in `ENVIRONMENT`."""


class AdapterConfig(Config):
    """The options of an adapter: a YAML or JSON file, or a mapping."""

    function: str | None = None
    """The reward function: ``file.py:name`` or ``package.module:name``."""

    manager: str = "naive"
    """The name or the import path of the reward manager."""

    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function, or of its class."""

    router_address: str | None = None
    """``host:port`` of the model servers, which functions receive as `reward_router_address`."""

    ground_truth: str | None = None
    """The field of the trainer's data with the reference answer; each adapter has a default."""

    data_source: str = "data_source"
    """The field of the trainer's data with the name of the data set."""

    concurrency: int | None = Field(default=None, ge=1)
    """The largest number of samples that are scored at the same time; by default there is no limit."""

    reward_loop: RewardLoopConfig = Field(default_factory=RewardLoopConfig)
    """All other options: timeout, policies, limits, retries, components, records (`log_dir`)."""


class ProcessAgent(AgentInThread):
    """A reward agent with the options of an adapter.

    Args:
        source: the options, or the path of their file.
        lacks: the arguments of functions that the trainer does not pass.

    Raises:
        ConfigError: options are missing, an option is invalid, or the function requires what the trainer lacks.
        FunctionLoadError: the function cannot be found, or cannot be called with the arguments of the reward loop.
    """

    def __init__(self, source: Source, lacks: frozenset[str] = frozenset()) -> None:
        self.source = source
        self.config = load_config(source)
        scorer = load_scorer(
            self.config.function,
            self.config.manager,
            self.config.reward_loop,
            reward_kwargs=self.config.reward_kwargs,
            router_address=self.config.router_address,
        )
        if missing := scorer.requires & lacks:
            raise ConfigError(
                f"the function {self.config.function} requires {listing(missing)}, which this trainer does not pass: "
                "give the parameter a default"
            )
        super().__init__(scorer, self.config.concurrency)

    def parts(self, data: Mapping[str, Any], ground_truth: str) -> dict[str, Any]:
        """Return ground truth, data source and extra info of a sample, as arguments of `RewardSample`.

        Args:
            data: the fields of the trainer's data; all of them become ``extra_info``.
            ground_truth: the field with the reference answer, unless the options name another one.

        Raises:
            ConfigError: the function requires a ground truth, and the data does not have its field.
        """
        name = self.config.ground_truth or ground_truth
        if name not in data and "ground_truth" in self.requires:
            raise ConfigError(
                f"the function {self.config.function} requires ground_truth, and the data has no field {name!r}: set "
                f"`ground_truth` in the options of the rewards to one of {listing(data)}"
            )
        return {
            "ground_truth": data.get(name),
            "data_source": str(data.get(self.config.data_source) or ""),
            "extra_info": data,
        }


_owner: AgentOwner[ProcessAgent] = AgentOwner()


async def process_agent(source: Source = None, *, lacks: frozenset[str] = frozenset()) -> ProcessAgent:
    """Return the agent of this process; the first call starts it.

    Args:
        source: the options, or the path of their file; by default the file in ``REWARD_LOOP_CONFIG``. It must be the
            same in all calls.
        lacks: the arguments of functions that the trainer does not pass.

    Raises:
        ConfigError: options are missing, an option is invalid, the agent was started with other options, or the
            function requires what the trainer lacks.
        FunctionLoadError: the function cannot be found, or cannot be called with the arguments of the reward loop.
    """
    agent = await _owner.get(lambda: ProcessAgent(source, lacks))
    if agent.source != source:
        raise ConfigError(
            f"this process scores with the options {shorten(agent.source)}, so {shorten(source)} has no effect: a "
            "process has one agent, with one set of options"
        )
    return agent


def close_agent() -> None:
    """Close the agent of this process, if it was started. A later call of `process_agent` starts another one."""
    _owner.close()


def load_config(source: Source = None) -> AdapterConfig:
    """Return the options of an adapter.

    Args:
        source: a mapping of options, or the path of a JSON or YAML file; by default the file in
            ``REWARD_LOOP_CONFIG``.

    Raises:
        ConfigError: options are missing, the file cannot be read, or an option is invalid.
    """
    source = source or os.environ.get(ENVIRONMENT)
    if not source:
        raise ConfigError(
            f"the rewards have no options: set the environment variable {ENVIRONMENT} to the path of a YAML "
            "or JSON file, such as {function: reward.py:compute_score}"
        )
    if isinstance(source, Mapping):
        return parse(AdapterConfig, source, "options")
    return parse(AdapterConfig, _read(Path(source)), str(source))


def _read(path: Path) -> Any:
    try:
        # Without the mark (BOM) that some editors write at the beginning of a file.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the options of the rewards, {path}, cannot be read: {error}") from None
    load: Callable[[str], Any] = json.loads
    invalid: type[Exception] = ValueError
    if path.suffix != ".json":
        try:
            import yaml
        except ImportError:
            raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install pyyaml, or use a .json file") from None
        load, invalid = yaml.safe_load, yaml.YAMLError
    try:
        return load(text)
    except invalid as error:
        raise ConfigError(f"{path}: this is not a valid file of options: {error}") from None
