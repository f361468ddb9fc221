"""The group of reward workers, on all nodes, as the trainer uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError
from reward_loop.limits import longest_call_s
from reward_loop.types import Reward, RewardSample
from reward_loop.verl.cluster import worker_nodes
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.reward_client import MAX_TASK_RETRIES, RewardClient, prompt_of, raise_if_lost
from reward_loop.verl.reward_worker import RewardWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S = 5.0
"""Timeout in seconds for the status of a worker that has samples in flight."""

COUNTS_S = 1.0
"""Timeout in seconds for counts of the reward workers. The trainer waits for them once a step."""

POLL_S = 2.0
"""Seconds between two polls for fatal errors, while the trainer waits for rewards."""

CHECK_S = 60.0
"""The longest wait for the rewards of a batch between two checks for fatal errors, in seconds."""


class _Requests:
    """Calls of one method of all reward workers, without waiting for busy workers. A worker has at most one open call.

    Args:
        handles: the workers.
        method: the name of the method.
    """

    def __init__(self, handles: Sequence[Any], method: str) -> None:
        self._handles = handles
        self._method = method
        self.open: dict[Any, int] = {}
        """Open call -> the position of its worker."""

    def send(self, *arguments: Any) -> None:
        """Call the method of each worker that has no open call."""
        busy = set(self.open.values())
        for position, worker in enumerate(self._handles):
            # A worker that blocks its event loop would otherwise collect calls.
            if position not in busy:
                self.open[getattr(worker, self._method).remote(*arguments)] = position

    def answers(self, timeout: float) -> list[Any]:
        """Return the results that arrive within ``timeout`` seconds. A later call returns the others.

        Raises:
            RewardLoopError: a worker died and did not start again.
        """
        if not self.open:
            return []
        answered, _ = ray.wait(list(self.open), num_returns=len(self.open), timeout=timeout)
        results = []
        for call in answered:
            del self.open[call]
            try:
                results.append(ray.get(call))
            except RayActorError as error:
                raise_if_lost(error)  # otherwise, Ray restarts the worker, or its samples fail
        return results


def longest_quiet_s(options: RewardLoopConfig, *, by_group: bool) -> float | None:
    """Return how many seconds may pass without a reward while samples are being scored; ``None`` if there is no bound.

    See `longest_call_s`. An incomplete group fails only after its timeout. The samples of a worker that dies start
    again when it has restarted, within ``worker_answer_timeout_s``. In an outage, all samples wait.

    Args:
        options: the options of the run.
        by_group: whether the manager waits for all rollouts of a prompt.
    """
    total = options.worker_answer_timeout_s + options.outage_timeout_s + (options.group.timeout if by_group else 0.0)
    longest = longest_call_s(options, options.timeout)
    return None if longest is None else total + longest


def _in_group(sample: Any, size: int) -> Any:
    """Return a sample with the number of rollouts of its prompt, for managers that need the whole group."""
    if isinstance(sample, RewardSample):
        return replace(sample, group_size=size)
    sample.non_tensor_batch["group_size"] = np.array([size] * len(sample), dtype=object)
    return sample


class RewardWorkers:
    """Starts the reward workers, distributed over all nodes, and scores batches with them.

    Ray restarts a worker that dies, on another node if its node is lost. Calls without an answer are sent again, up to
    `MAX_TASK_RETRIES` times each: samples by the client when the worker is reachable again, other calls by Ray.

    Args:
        settings: the settings of rewards.
        router: the ``host:port`` of the router in front of the reward models; ``None`` without a reward model.
    """

    def __init__(self, settings: RewardSettings, router: str | None) -> None:
        actor = ray.remote(RewardWorker)
        nodes = worker_nodes(settings.num_workers)
        self.handles = [
            actor.options(
                # Without a bound, which a long run could reach. `MAX_TASK_RETRIES` bounds those that one sample causes.
                max_restarts=-1,
                max_task_retries=MAX_TASK_RETRIES,
                # Ray's default of 1,000 would make further samples wait in Ray, without a limit or a deadline of ours.
                max_concurrency=100_000,
                # Soft: if the node is lost, Ray restarts the worker on another one.
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id=node, soft=True
                ),
            ).remote(settings, router, nodes.count(node))
            for node in nodes
        ]
        self.client = RewardClient(self.handles, settings.options)
        self._fatal_errors = _Requests(self.handles, "fatal_error")
        self._polled_at = 0.0
        self._exchange_counts = _Requests(self.handles, "exchange_counts")

    def wait_until_ready(self) -> None:
        """Wait until every worker has loaded the tokenizer and the user's function.

        Raises:
            RewardLoopError: a worker failed to start, or did not start in time.
        """
        self.client.by_group = any(self._ask_all("needs_group", "worker_start_timeout_s"))

    def check_fatal_errors(self) -> None:
        """Raise the fatal error of a worker, if there is one. Waits for the answers of all workers.

        Raises:
            RewardLoopError: a sample had no score and the policy is ``raise``, or too many samples failed.
        """
        _raise_first(self._ask_all("fatal_error"))

    def poll_fatal_errors(self) -> None:
        """Raise the fatal error of a worker, like `check_fatal_errors`, but without waiting.

        Reads the answers to requests of earlier calls, and sends new requests every `POLL_S` seconds. A worker that
        does not answer may be busy; one that died and did not start again is an error.
        """
        _raise_first(self._fatal_errors.answers(0))
        if time.monotonic() - self._polled_at > POLL_S:
            self._fatal_errors.send()
            self._polled_at = time.monotonic()

    def check_fatal_errors_briefly(self) -> None:
        """Raise the fatal error of a worker, like `check_fatal_errors`, while samples are in flight.

        Waits at most `BUSY_S` seconds. A worker that does not answer counts as busy: its manager may block the event
        loop until its samples are scored. Its answer is read by a later call. A worker that died and did not start
        again is an error.
        """
        _raise_first(self._fatal_errors.answers(0))
        self._fatal_errors.send()
        _raise_first(self._fatal_errors.answers(BUSY_S))
        if self._fatal_errors.open:
            logger.warning(
                "%d of %d reward workers did not answer within %g s: does the reward manager, or an async function, "
                "block the event loop?",
                *(len(self._fatal_errors.open), len(self.handles), BUSY_S),
            )

    def exchange_counts(self) -> list[dict[str, Any]]:
        """Return the counts of exchanges with model servers since the last call.

        Waits at most `COUNTS_S` seconds. A later call returns the counts of a worker that does not answer in time.
        """
        self._exchange_counts.send()
        return [counts for counts in self._exchange_counts.answers(COUNTS_S) if counts is not None]

    def stop(self) -> None:
        """Stop scoring at the end of training, see `RewardWorker.stop`.

        Waits at most `BUSY_S` seconds: a worker that blocks its event loop ends with the run.
        """
        ray.wait([worker.stop.remote() for worker in self.handles], num_returns=len(self.handles), timeout=BUSY_S)

    def score_batch(self, rows: Sequence[Any]) -> list[Reward]:
        """Score a batch, and return the rewards in the order of its rows.

        Args:
            rows: the rollouts, from `read_sessions`. If the manager needs whole groups, all rollouts of each prompt.
                Those that failed are not awaited: the others are the group.

        Raises:
            RewardLoopError: the run must stop; no reward arrived for longer than the timeout of the function and its
                retries; or a worker does not respond.
        """
        if self.client.by_group:
            sizes = Counter(map(prompt_of, rows))
            rows = [_in_group(row, sizes[prompt_of(row)]) for row in rows]
        return self._results([self.client.reward_of(row) for row in rows])

    def _results(self, pending: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for calls of workers, and return their results."""
        try:
            # The trainer's thread has no event loop.
            return asyncio.run(self._gather(pending))
        except RayTaskError as error:
            # First the stored error of a worker, which names the sample and the cause.
            self.check_fatal_errors()
            raise RewardLoopError(f"a reward worker failed: {error}") from error

    async def _gather(self, pending: Sequence[Awaitable[T]]) -> list[T]:
        """Fail if no result arrives for longer than `longest_quiet_s` seconds."""
        options = self.client.options
        patience = longest_quiet_s(options, by_group=self.client.by_group)
        calls = [asyncio.ensure_future(call) for call in pending]
        left, last_arrival = set(calls), time.monotonic()
        while left:
            done, left = await asyncio.wait(left, timeout=min(options.worker_answer_timeout_s, CHECK_S))
            quiet = time.monotonic() - last_arrival
            if done:
                last_arrival += quiet
            elif left:
                self.check_fatal_errors()  # also checks that all workers respond
                if patience is not None and quiet > patience:
                    raise RewardLoopError(
                        f"{len(left)} of {len(calls)} rewards are missing, and none arrived for {quiet:.0f} s. With "
                        "reward_loop.timeout, retry.max_seconds, outage_timeout_s, group.timeout, the max_wait of the "
                        f"limits and worker_answer_timeout_s, one should arrive within {patience:g} s: does the reward "
                        "manager wait without a deadline?"
                    )
        return await asyncio.gather(*calls)

    def _ask_all(self, question: str, option: str = "worker_answer_timeout_s") -> list[Any]:
        """Call a method of all workers, and return the results.

        Args:
            question: the name of the method.
            option: the name of the option with the timeout.

        Raises:
            RewardLoopError: a worker did not start, or did not answer in time.
        """
        timeout: float = getattr(self.client.options, option)
        deadline = time.monotonic() + timeout
        while True:
            asked = [getattr(worker, question).remote() for worker in self.handles]
            try:
                return ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
            except ActorUnavailableError as error:
                if time.monotonic() < deadline:
                    continue  # its node may be lost, and Ray has not detected it yet
                cause: Exception = error
            except RayActorError as error:
                raise RewardLoopError(f"a reward worker did not start: {error}") from error
            except ray.exceptions.GetTimeoutError as error:
                cause = error
            raise RewardLoopError(
                f"a reward worker did not answer within {timeout:g} s (reward_loop.{option}): raise it for a slow "
                "shared file system; otherwise, does the reward function or its manager block the event loop?"
            ) from cause


def _raise_first(fatal_errors: Sequence[str | None]) -> None:
    for message in fatal_errors:
        if message is not None:
            raise RewardLoopError(message)
