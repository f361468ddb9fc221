"""One reward agent for the process of a trainer that only takes a function, and so has no place that owns an agent.

The first call of such a function starts the agent, on an event loop of its own in a background thread: trainers call
from several event loops, and some of them close theirs after each batch. The module owns the agent and closes it when
the interpreter exits.

The options come from a file, whose path is in the environment variable ``REWARD_LOOP_CONFIG``, unless the trainer has
a place for them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from reward_loop._util.background_loop import in_background
from reward_loop._util.text import listing, shorten
from reward_loop.agent import RewardAgent
from reward_loop.config import Config, RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import Scorer, load_scorer, scores_groups
from reward_loop.types import Reward, RewardSample

__all__ = [
    "ENVIRONMENT",
    "AdapterConfig",
    "ProcessAgent",
    "Source",
    "close_agent",
    "info_of",
    "load_config",
    "missing_field",
    "process_agent",
]

ENVIRONMENT = "REWARD_LOOP_CONFIG"
"""The environment variable with the path of the file of options."""


Source = str | Mapping[str, Any] | None
"""Options, or the path of their file; ``None`` for the file in `ENVIRONMENT`."""


class AdapterConfig(Config):
    """The options of an adapter: a YAML or JSON file, or a mapping."""

    function: str | None = None
    """The reward function: ``file.py:name`` or ``package.module:name``. Not needed for a ``composite`` whose components
    have a path each."""

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
    """All other options: timeout, policies, limits, retries, cache, components, records (`log_dir`)."""


class ProcessAgent:
    """A `RewardAgent` on an event loop in a background thread, for callers on any event loop.

    Args:
        config: its options.

    Raises:
        ConfigError: an option is invalid.
        FunctionLoadError: the function cannot be found, or cannot be called with the arguments of the reward loop.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self.config = config
        self.pid = os.getpid()
        self._scorer: Scorer = load_scorer(
            config.function,
            config.manager,
            config.reward_loop,
            reward_kwargs=config.reward_kwargs,
            router_address=config.router_address,
        )
        self._stack = ExitStack()
        self._agent, self._loop = self._stack.enter_context(in_background(self._running, name="reward-agent"))

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[RewardAgent, asyncio.AbstractEventLoop]]:
        async with RewardAgent(self._scorer.manager, concurrency=self.config.concurrency) as agent:
            yield agent, asyncio.get_running_loop()

    @property
    def needs_group(self) -> bool:
        """Whether the manager, or ``post_process_scores`` of the function, compares the samples of a group."""
        return scores_groups(self._scorer.manager)

    @property
    def requires(self) -> frozenset[str]:
        """The fields of a sample that the function requires."""
        return self._scorer.requires

    async def score(self, samples: Sequence[RewardSample], groups: Sequence[int] | None = None) -> list[Reward]:
        """Return the rewards of samples, in order. If the caller is cancelled, so are the samples.

        Args:
            samples: the samples; members of a group are neighbours.
            groups: the size of each group; by default, each sample is a group of its own.

        Raises:
            RewardLoopError: an error that must stop the run, such as too many failures; or the agent is closed.
        """
        if self._loop.is_closed():
            raise RewardLoopError("the agent of this process is closed: the interpreter is exiting")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._score(samples, groups), self._loop))

    async def _score(self, samples: Sequence[RewardSample], groups: Sequence[int] | None) -> list[Reward]:
        pending = self._agent.submit(samples, groups=groups)
        try:
            return await pending
        except asyncio.CancelledError:
            pending.cancel()
            raise

    def close(self) -> None:
        """Cancel the samples that have not ended, and stop the agent. Blocks until it has stopped."""
        self._stack.close()


_lock = threading.Lock()
_started: tuple[Source, ProcessAgent] | None = None


async def process_agent(source: Source = None) -> ProcessAgent:
    """Return the agent of this process; the first call starts it.

    Args:
        source: the options, or the path of their file; by default the file in ``REWARD_LOOP_CONFIG``. It must be the
            same in all calls.

    Raises:
        ConfigError: there are no options, an option is invalid, or the agent was started with other options.
        FunctionLoadError: the function cannot be found, or cannot be called with the arguments of the reward loop.
    """
    # In a thread: loading the function may take seconds, which must not block the event loop of the trainer.
    started = _started
    if started is None or started[1].pid != os.getpid():  # a fork has the agent, but not its thread
        started = await asyncio.to_thread(_start, source)
    used, agent = started
    if used != source:
        raise ConfigError(
            f"this process scores with the options {shorten(used)}, so {shorten(source)} has no effect: a process has "
            "one agent, with one set of options"
        )
    return agent


def _start(source: Source) -> tuple[Source, ProcessAgent]:
    global _started
    with _lock:
        if _started is None or _started[1].pid != os.getpid():
            _started = source, ProcessAgent(load_config(source))
        return _started


def close_agent() -> None:
    """Close the agent of this process, if it was started. A later call of `process_agent` starts another one."""
    global _started
    with _lock:
        started, _started = _started, None
    if started is not None:
        started[1].close()


def load_config(source: Source = None) -> AdapterConfig:
    """Return the options of an adapter.

    Args:
        source: a mapping of options, or the path of a JSON or YAML file; by default the file in
            ``REWARD_LOOP_CONFIG``.

    Raises:
        ConfigError: there are no options, the file cannot be read, or an option is invalid.
    """
    source = source or os.environ.get(ENVIRONMENT)
    if not source:
        raise ConfigError(
            f"there are no options for the rewards: set the environment variable {ENVIRONMENT} to the path of a YAML "
            "or JSON file, such as {function: reward.py:compute_score}"
        )
    if isinstance(source, Mapping):
        return parse(AdapterConfig, source, "options")
    return parse(AdapterConfig, _read(Path(source)), str(source))


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the options of the rewards, {path}, cannot be read: {error}") from None
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if importlib.util.find_spec("yaml") is None:
            raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install pyyaml, or use a .json file")
        return _yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: this is not a valid file of options: {error}") from None


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def info_of(reward: Reward) -> dict[str, Any]:
    """Return the extra info of a reward, also of a manager that was written for verl and sets no outcome."""
    defaults = {"reward_outcome": "scored", "reward_masked": False, "reward_error": ""}
    return {**defaults, **(reward.get("reward_extra_info") or {})}


def missing_field(agent: ProcessAgent, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for data without the field of the ground truth, which the function requires."""
    return ConfigError(
        f"the function {agent.config.function} requires ground_truth, and the data has no field {name!r}: set "
        f"`ground_truth` in the options of the rewards to one of {listing(known)}"
    )
