"""Reward workers: Ray actors on all nodes that score verl's rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
import zlib
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayActorError, RayTaskError

from reward_loop.errors import ConfigError, InvalidScoreError, RewardFunctionError, RewardLoopError
from reward_loop.limits.client import open_limits
from reward_loop.limits.failures import FailureBound, failure_bound
from reward_loop.limits.permit import Limits
from reward_loop.managers import RewardLoopManagerBase, scoring_function
from reward_loop.managers.base import last_row, uid_of
from reward_loop.managers.policy import apply_policy, fail_reward
from reward_loop.managers.post_process import PostProcess
from reward_loop.managers.registry import get as get_manager
from reward_loop.managers.registry import names as manager_names
from reward_loop.processes.pool import usable_cores
from reward_loop.records import ActiveSample, record, records, watch
from reward_loop.scoring import ScoringFunction
from reward_loop.scoring.dense_rewards import check_result
from reward_loop.scoring.isolation import SplitSemaphore
from reward_loop.scoring.load import load_function, load_object
from reward_loop.scoring.normalise import normalise
from reward_loop.types import PART_KEYS, RESERVED_KEYS, Outcome, Reward, RewardResult, RewardSample
from reward_loop.verl import discriminative
from reward_loop.verl.discriminative import DiscriminativeRewardLoopManager
from reward_loop.verl.resolve import reward_loop_options
from reward_loop.verl.reward_model import reward_model_options, scores_by_model
from reward_loop.verl.router_address import RouterAddress, address_on_this_node, worker_nodes

__all__ = ["RewardClient", "RewardWorker", "RewardWorkers"]

logger = logging.getLogger(__name__)

GC_THRESHOLD = 200_000
"""The number of new objects that triggers a garbage collection. A sample in flight has about 40 objects, so Python's
default of 700 would trigger a collection every 20 samples, although samples in flight are not garbage."""

MAX_TASK_RETRIES = 3
"""How many times a sample is scored again after its worker died. After that, the sample has failed."""

BUSY_S = 5.0
"""Timeout in seconds for the status of a worker that has samples in flight."""

LOOK_S = 2.0
"""Seconds between two polls for fatal errors, while the trainer waits for rewards."""


def settle_gc() -> None:
    """Reduces the pauses of the event loop that the garbage collector causes in a reward worker.

    Objects that exist now are excluded from collections: torch and verl create more than a million objects, which a
    full collection would scan for half a second. New objects, such as samples in flight, are scanned less often; see
    `GC_THRESHOLD`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


class RewardWorker:
    """Scores samples with one reward manager. A Ray actor with asynchronous methods.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.resolve.settle`.
        router: how the workers reach the router in front of the reward models; ``None`` without a reward model.
    """

    def __init__(self, config: DictConfig, router: RouterAddress | str | None) -> None:
        self._options = reward_loop_options(config)
        self._limits = open_limits(self._options)
        self._open = contextlib.ExitStack()
        address = self._open.enter_context(address_on_this_node(router))
        self._manager = _build_manager(config, address, self._limits)
        function = _post_processing(self._manager)
        self._post_process = PostProcess(function, self._options) if function is not None else None
        self._rejections = FailureBound.of_options(self._options, of=", ".join(sorted(PART_KEYS)))
        self._fatal: str | None = None
        settle_gc()
        self._records = records(self._options.log_dir) if self._options.log_dir else None
        watch()  # so that `reward-loop stuck` also lists an idle worker
        self._failures = failure_bound(self._options, self._limits)

    async def compute_score(self, data: Any) -> Reward:
        """Scores one rollout.

        Args:
            data: a ``DataProto`` with one row per output of the rollout.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        try:
            if isinstance(self._manager, RewardLoopManagerBase):
                return await self._manager.run_single(data)
            return await self._run_foreign(data)
        except RewardLoopError as error:
            self._fatal = self._fatal or f"{type(error).__name__}: {error}"
            raise

    async def stop_run(self, message: str) -> None:
        """Stores a fatal error of another process: the next `fatal_error` returns it."""
        self._fatal = self._fatal or message

    async def fatal_error(self) -> str | None:
        """Returns why the run must stop, or ``None``. Also used as a health check."""
        if self._fatal is None and self._options.job:
            self._fatal = await self._limits.why_stopped()
        return self._fatal

    async def has_post_process(self) -> bool:
        """Returns whether the user's class has ``post_process_scores``."""
        return self._post_process is not None

    async def post_process(self, rewards: list[Reward], names: list[str]) -> list[Reward]:
        """Applies the user's ``post_process_scores`` to the rewards of one group.

        Args:
            rewards: the rewards of the group's samples.
            names: the name of each sample, for messages.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        assert self._post_process is not None
        try:
            return await self._post_process(rewards, names)
        except RewardLoopError as error:
            self._fatal = self._fatal or f"{type(error).__name__}: {error}"
            raise

    async def reject(self, rewards: list[Reward], names: list[str], problems: list[str], accepted: int) -> list[Reward]:
        """Turns samples whose ``turn_level_scores`` or ``token_level_scores`` do not fit into failed samples.

        Args:
            rewards: the rewards of these samples.
            names: the name of each sample.
            problems: the problem of each sample.
            accepted: the number of samples whose scores fit; they count in the bound on the share of failures.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        for _ in range(accepted):
            self._rejections.add(False, None)
        try:
            return [
                fail_reward(
                    # Drop the other values that the function returned, as for every failed sample.
                    Reward(reward_score=0.0, reward_extra_info=_reserved(reward["reward_extra_info"])),
                    InvalidScoreError(problem, sample=RewardSample("", uid=name)),
                    self._rejections,
                    self._options,
                )
                for reward, name, problem in zip(rewards, names, problems, strict=True)
            ]
        except RewardLoopError as error:
            self._fatal = self._fatal or f"{type(error).__name__}: {error}"
            raise

    async def needs_group(self) -> bool:
        """Returns whether one worker must receive all samples of a prompt. Also used as a health check."""
        return getattr(self._manager, "needs_group", False)

    async def _run_foreign(self, data: Any) -> Reward:
        """Runs a manager that was written for verl, and adds the outcome, the timeout and the failure policy."""
        name = type(self._manager).__name__
        row = last_row(data)
        sample = RewardSample("", data_source=str(row.get("data_source", "")), uid=uid_of(row))
        with ActiveSample(sample, f"reward manager {name}", self._options.watchdog_s) as call:
            result = check_result(sample, await self._result_of_foreign(data, name))
            if self._records is not None:
                self._records.write(record(call, result))
        self._failures.count(result)
        return apply_policy(result, self._options)

    async def _result_of_foreign(self, data: Any, name: str) -> RewardResult:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._options.timeout):
                returned = await self._manager.run_single(data)
            score, _ = normalise(returned["reward_score"])
            return RewardResult(
                outcome=Outcome.UNSCORED if score is None else Outcome.SCORED,
                score=score,
                extra_info=dict(returned.get("reward_extra_info") or {}),
                seconds=loop.time() - started,
            )
        except Exception as error:
            failure = RewardFunctionError(f"reward manager {name}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return RewardResult(
                outcome=Outcome.FAILED,
                score=None,
                error=str(failure),
                exception=failure,
                seconds=loop.time() - started,
            )


def _build_manager(config: DictConfig, reward_router_address: str | None, limits: Limits) -> Any:
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    def tokenizer(path: str) -> Any:
        return hf_tokenizer(copy_to_local(path), trust_remote_code=True)

    policy = config.actor_rollout_ref.model
    keywords = {
        "tokenizer": tokenizer(policy.get("tokenizer_path") or policy.path),
        "reward_router_address": reward_router_address,
        "reward_model_tokenizer": (
            tokenizer(config.reward.reward_model.model_path) if config.reward.reward_model.enable else None
        ),
    }
    if scores_by_model(config):
        return DiscriminativeRewardLoopManager(config, compute_score=_model_scoring(config, limits), **keywords)
    function = _user_function(config)  # importing its module may register the manager
    manager = config.reward.reward_manager
    if manager.source == "importlib":
        cls: Any = load_object(manager.module.path, manager.name)
    elif manager.name in manager_names() or ":" in manager.name:
        cls = get_manager(manager.name)
    else:
        cls = None
    if cls is not None and issubclass(cls, RewardLoopManagerBase):
        built = cls(config=config, compute_score=_scoring_function(cls, config, function, limits), **keywords)
    else:
        from verl.trainer.ppo.reward import load_reward_manager

        built = load_reward_manager(config, keywords.pop("tokenizer"), **keywords)
    if hasattr(function, "post_process_scores") and _post_processing(built) is None:
        custom = config.reward.custom_reward_function
        raise ConfigError(
            f"custom_reward_function {custom.path}:{custom.name} has post_process_scores, which reward manager "
            f"{manager.name} would not lead to: use the manager `naive`, or one of your own that inherits from "
            "RewardLoopManagerBase"
        )
    return built


def _reserved(info: dict[str, Any]) -> dict[str, Any]:
    """Returns only the keys that the reward loop itself adds."""
    return {name: value for name, value in info.items() if name in RESERVED_KEYS}


def _post_processing(manager: Any) -> ScoringFunction | None:
    """Returns the manager's function if it has ``post_process_scores``, else ``None``."""
    function = getattr(manager, "function", None)
    return function if isinstance(function, ScoringFunction) and function.has_post_process else None


def _user_function(config: DictConfig) -> Any:
    custom = config.reward.custom_reward_function
    return load_function(custom.path, custom.name) if custom.path else None


def _scoring_function(cls: type[RewardLoopManagerBase], config: DictConfig, function: Any, limits: Limits) -> Any:
    options = reward_loop_options(config)
    if options.max_processes is None:
        share = max(1, usable_cores() // config.reward.num_workers)
        options = options.model_copy(update={"max_processes": share})
    reward_kwargs: Any = config.reward.custom_reward_function.get("reward_kwargs")
    if function is None and not issubclass(cls.function_type, ScoringFunction):
        raise ConfigError(
            f"reward_model.reward_manager={config.reward.reward_manager.name} needs a function of lists: set "
            "custom_reward_function.path"
        )
    if function is None:
        from verl.utils.reward_score import default_compute_score

        function, reward_kwargs = default_compute_score, _sandbox_kwargs(config)
    elif reward_kwargs is not None:
        reward_kwargs = OmegaConf.to_container(reward_kwargs)
    return scoring_function(cls, function, options, reward_kwargs=reward_kwargs, limits=limits)


def _model_scoring(config: DictConfig, limits: Limits) -> Any:
    options, model = reward_loop_options(config), reward_model_options(config)
    assert model is not None
    return scoring_function(
        DiscriminativeRewardLoopManager,
        discriminative.compute_score,
        options,
        reward_kwargs={"model": model.served_model_name or model.model_path},
        limits=limits,
    )


def _sandbox_kwargs(config: DictConfig) -> dict[str, Any]:
    sandbox = config.reward.sandbox_fusion
    if not sandbox.url:
        return {}
    # Divide the limit among the workers: it holds for the whole job.
    share = max(1, sandbox.max_concurrent // config.reward.num_workers)
    return {
        "sandbox_fusion_url": sandbox.url,
        "concurrent_semaphore": SplitSemaphore(share),
        "memory_limit_mb": sandbox.memory_limit_mb,
    }


class RewardClient:
    """Distributes samples among the reward workers.

    verl's agent loop uses it like the handle of one reward worker: ``await client.compute_score.remote(data)``. Samples
    go to the workers in turn; with ``by_group``, all samples of a prompt go to the same worker. A sample whose worker
    dies repeatedly has failed.
    """

    def __init__(self, workers: Sequence[Any], config: DictConfig) -> None:
        self._workers = list(workers)
        self.options = reward_loop_options(config)
        self._turn = 0
        self.by_group = False

    def worker_for(self, data: Any) -> Any:
        """Returns the next worker in turn; with ``by_group``, the worker of the prompt, the same in every process."""
        if self.by_group:
            uid = str(data.non_tensor_batch["uid"][-1])
            return self._workers[zlib.crc32(uid.encode()) % len(self._workers)]
        self._turn += 1
        return self._workers[(self._turn - 1) % len(self._workers)]

    @property
    def compute_score(self) -> RewardClient:
        """The client itself: verl calls ``compute_score.remote``."""
        return self

    def remote(self, data: Any) -> Coroutine[Any, Any, Reward]:
        """Returns a coroutine that scores ``data``, one rollout as a ``DataProto``."""
        return self._score(data)

    async def _score(self, data: Any) -> Reward:
        worker = self.worker_for(data)
        try:
            return await worker.compute_score.remote(data)
        except RayActorError as error:
            try:
                return self.died(error)
            except RewardFunctionError as failure:
                # The trainer runs in another process and reads fatal errors from the workers.
                await worker.stop_run.remote(f"{type(failure).__name__}: {failure}")
                raise

    def died(self, error: RayActorError) -> Reward:
        """Returns the reward of a sample whose worker died too often.

        Raises:
            RewardFunctionError: the policy is ``raise``.
        """
        failure = RewardFunctionError(
            f"the reward worker died {MAX_TASK_RETRIES + 1} times while it scored this sample: does the reward "
            f"function crash the interpreter, or run out of memory? ({type(error).__name__})"
        )
        logger.error("%s", failure)
        result = RewardResult(outcome=Outcome.FAILED, score=None, error=str(failure), exception=failure)
        return apply_policy(result, self.options)


class RewardWorkers:
    """Starts the reward workers, distributed over all nodes, and scores batches with them.

    Ray restarts a worker that dies, on another node if its node is lost, and sends its unanswered calls again, up to
    `MAX_TASK_RETRIES` times each.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.resolve.settle`.
        router: how the workers reach the router in front of the reward models; ``None`` without a reward model.
    """

    def __init__(self, config: DictConfig, router: RouterAddress | str | None) -> None:
        actor = ray.remote(RewardWorker)
        # Keep this reference: without it, Ray frees an argument over 100 KB, and cannot restart a worker.
        self._config = ray.put(config)
        self.handles = [
            actor.options(
                max_restarts=-1,
                max_task_retries=MAX_TASK_RETRIES,
                max_concurrency=100_000,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id=node, soft=True
                ),
            ).remote(self._config, router)
            for node in worker_nodes(config.reward.num_workers)
        ]
        self.client = RewardClient(self.handles, config)
        self._asked: list[Any] = []
        self._asked_at = 0.0

    def wait_until_ready(self) -> None:
        """Waits until every worker has loaded the tokenizer and the user's function.

        Raises:
            RewardLoopError: a worker failed to start, or did not start in time.
        """
        self.client.by_group = any(self._ask_all("needs_group", "worker_start_timeout_s"))

    def raise_fatal_error(self) -> None:
        """Raises the fatal error of a worker, if there is one. Waits for the answers of all workers.

        Raises:
            RewardLoopError: a sample had no score and the policy is ``raise``, or too many samples failed.
        """
        for message in self._ask_all("fatal_error"):
            if message is not None:
                raise RewardLoopError(message)

    def look_for_fatal_error(self) -> None:
        """Raises the fatal error of a worker, like `raise_fatal_error`, but without waiting.

        Reads the answers to requests of earlier calls, and sends new requests every `LOOK_S` seconds. A worker that
        does not answer may be busy.

        Raises:
            RewardLoopError: a worker reported that the run must stop.
        """
        self._take_answers(0)
        if not self._asked and time.monotonic() - self._asked_at > LOOK_S:
            self._ask()

    def ask_for_fatal_error(self) -> None:
        """Raises the fatal error of a worker, like `raise_fatal_error`, while samples are in flight.

        Waits at most `BUSY_S` seconds. A worker that does not answer counts as busy: its manager may block the event
        loop until its samples are scored. Its answer is read by a later call.

        Raises:
            RewardLoopError: a worker reported that the run must stop.
        """
        self._take_answers(0)
        self._ask()
        self._take_answers(BUSY_S)
        if self._asked:
            logger.warning(
                "%d of %d reward workers did not answer within %g s: does the reward manager, or an async function, "
                "block the event loop?",
                *(len(self._asked), len(self.handles), BUSY_S),
            )

    def _ask(self) -> None:
        self._asked = [worker.fatal_error.remote() for worker in self.handles]
        self._asked_at = time.monotonic()

    def _take_answers(self, timeout: float) -> None:
        if not self._asked:
            return
        answered, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=timeout)
        for answer in answered:
            with contextlib.suppress(RayActorError):  # Ray restarts the worker, or its samples fail
                if (message := ray.get(answer)) is not None:
                    raise RewardLoopError(message)

    def start_batch(self, rows: Sequence[Any]) -> list[Any]:
        """Sends ``rows``, one ``DataProto`` per rollout, to the workers; returns the input of :meth:`finish_batch`."""
        return [self.client.worker_for(row).compute_score.remote(row) for row in rows]

    def finish_batch(self, pending: list[Any]) -> list[Reward]:
        """Waits for the rewards of a batch, and returns them in the order of its rows.

        Raises:
            RewardLoopError: the run must stop; no reward arrived for longer than the timeout of the function and its
                retries; or a worker does not respond.
        """
        self._wait_for(pending)
        rewards = []
        for reward in pending:
            try:
                rewards.append(self._get(reward))
            except RayActorError as error:
                rewards.append(self.client.died(error))
        return rewards

    def _wait_for(self, pending: list[Any]) -> None:
        """Waits until all rewards have arrived.

        A sample waits for a thread or a permit only while another sample runs. So at least one sample ends within the
        timeout of the function plus ``retry.max_seconds``; if none does, the wait fails.
        """
        options = self.client.options
        left, last_news = list(pending), time.monotonic()
        while left:
            done, left = ray.wait(left, num_returns=len(left), timeout=options.worker_answer_timeout_s)
            quiet = time.monotonic() - last_news
            if done:
                last_news += quiet
            elif left:
                self.raise_fatal_error()  # also checks that all workers respond
                if options.timeout is not None and quiet > options.timeout + options.retry.max_seconds:
                    raise RewardLoopError(
                        f"{len(left)} of {len(pending)} rewards are missing, and none came for {quiet:.0f} s, although "
                        f"reward_loop.timeout={options.timeout:g} and reward_loop.retry.max_seconds="
                        f"{options.retry.max_seconds:g}: does the reward manager keep samples waiting?"
                    )

    def have_post_process(self) -> bool:
        """Returns whether the user's class has ``post_process_scores``."""
        return any(self._ask_all("has_post_process"))

    def post_process(self, groups: list[list[Reward]], names: list[list[str]]) -> list[list[Reward]]:
        """Applies the user's ``post_process_scores`` to groups, all in the same worker.

        Args:
            groups: the rewards of each group.
            names: the names of the samples of each group, for messages.

        Raises:
            RewardLoopError: the run must stop, or the worker died too often.
        """
        worker = self.handles[0]
        pending = [worker.post_process.remote(rewards, of) for rewards, of in zip(groups, names, strict=True)]
        self._wait_for(pending)
        try:
            return [self._get(group) for group in pending]
        except RayActorError as error:
            raise RewardLoopError(f"a reward worker kept dying in post_process_scores: {error}") from error

    def reject(self, rewards: list[Reward], names: list[str], problems: list[str], accepted: int) -> list[Reward]:
        """Turns samples with misfitting scores into failed samples; see `RewardWorker.reject`.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed; or the worker
                died too often.
        """
        pending = self.handles[0].reject.remote(rewards, names, problems, accepted)
        self._wait_for([pending])
        try:
            return self._get(pending)
        except RayActorError as error:
            raise RewardLoopError(f"a reward worker kept dying while it counted rejected rewards: {error}") from error

    def _get(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except RayTaskError as error:
            self.raise_fatal_error()
            raise RewardLoopError(f"a reward worker failed: {error}") from error

    def _ask_all(self, question: str, option: str = "worker_answer_timeout_s") -> list[Any]:
        """Calls a method of all workers, and returns the results.

        Args:
            question: the name of the method.
            option: the name of the option with the timeout.

        Raises:
            RewardLoopError: a worker did not start, or did not answer in time.
        """
        timeout: float = getattr(self.client.options, option)
        try:
            return ray.get([getattr(worker, question).remote() for worker in self.handles], timeout=timeout)
        except RayActorError as error:
            raise RewardLoopError(f"a reward worker did not start: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise RewardLoopError(
                f"a reward worker gave no sign of life for {timeout:g} s (reward_loop.{option}): a slow shared file "
                "system needs more; otherwise, does the reward function or its manager block the event loop?"
            ) from error
