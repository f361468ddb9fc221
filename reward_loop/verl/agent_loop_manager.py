"""verl's agent loop workers, which are replaced when they die.

verl starts each worker once: a death would end the run, or make the trainer wait indefinitely.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import assign_non_tensor

from reward_loop.errors import RewardLoopError
from reward_loop.verl.agent_loop import RewardAgentLoopWorker
from reward_loop.verl.cluster import worker_nodes
from reward_loop.verl.compat import overrides, uses
from reward_loop.verl.tq_rows import unfinished_prompts

uses(
    __name__,
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ",
    "agent_loop_workers_class",
    "agent_loop_workers",
    "config",
    "llm_client",
    "teacher_client",
    "reward_loop_worker_handles",
)
uses(__name__, "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ", "generate_sequences(batch)")
uses(__name__, "verl.utils.tensordict_utils", "assign_non_tensor(tensor_dict)")

AGENT_LOOP_MANAGER = "reward_loop.verl.agent_loop_manager.RewardAgentLoopManager"

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""How many times a replacement is started, if it dies before it is ready."""


MAX_DEATHS = 3
"""How many workers may die while they have the same prompt. The next death ends the run."""


@dataclass(slots=True)
class _AssignedPrompt:
    worker: int
    batch: Any
    position: int
    deaths: int = 0


class Assignments:
    """The prompts of each worker, with their data, so that the prompts of a dead worker can be sent again."""

    def __init__(self) -> None:
        self._prompts: dict[str, _AssignedPrompt] = {}

    def assign(self, worker: int, batch: Any, uids: Iterable[str]) -> None:
        """Record that a worker received prompts: ``batch`` has a row for each uid, and can be sliced."""
        for position, uid in enumerate(uids):
            self._prompts[uid] = _AssignedPrompt(worker, batch, position)

    def keep(self, unfinished: Collection[str]) -> None:
        """Remove all prompts but these."""
        self._prompts = {uid: prompt for uid, prompt in self._prompts.items() if uid in unfinished}

    def of(self, workers: Collection[int]) -> set[str]:
        """Return the uids of the prompts of these workers. Some of the prompts may be finished."""
        return {uid for uid, prompt in self._prompts.items() if prompt.worker in workers}

    def get(self, uid: str) -> tuple[int, Any]:
        """Return the number of the worker that has a prompt, and the prompt's data, a slice of its batch."""
        prompt = self._prompts[uid]
        return prompt.worker, prompt.batch[prompt.position : prompt.position + 1]

    def count_deaths(self, uids: Collection[str]) -> None:
        """Record that the worker of these prompts died before they were finished.

        Raises:
            RewardLoopError: this happened more than `MAX_DEATHS` times to one of them.
        """
        for uid in uids:
            self._prompts[uid].deaths += 1
        if worst := sorted(uid for uid in uids if self._prompts[uid].deaths > MAX_DEATHS):
            more = f" and {len(worst) - 1} other prompts" if len(worst) > 1 else ""
            raise RewardLoopError(
                f"{MAX_DEATHS + 1} agent loop workers died in a row while they had prompt {worst[0]}{more}: does the "
                "agent loop or one of its tools crash the interpreter, or run out of memory?"
            )


class RewardAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager, which can replace dead workers and send their prompts again."""

    worker_class: ClassVar[Any] = RewardAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After verl's constructor, which sets its own class.
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self._assignments = Assignments()
        self._deaths: list[Any] = []
        """For each worker, a call that fails when the worker dies."""
        self._receipt_timeout_s = OmegaConf.select(self.config, "reward_loop.worker_start_timeout_s", default=300.0)

    @overrides(AgentLoopManagerTQ)
    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        self._deaths = [worker.until_death.remote() for worker in self.agent_loop_workers]

    @overrides(AgentLoopManagerTQ)
    def generate_sequences(self, prompts: TensorDict) -> None:
        """Send prompts to the workers, in equal parts.

        The part of a worker that has died is sent again when the worker is replaced.
        """
        # Finished prompts are not sent again, and their data would fill the memory.
        self._assignments.keep(set().union(*unfinished_prompts().values()))
        parts = list(enumerate(prompts.chunk(len(self.agent_loop_workers))))
        for number, part in parts:
            # Before it is sent: the worker may die while it receives its part.
            self._assignments.assign(number, part, part["uid"])
        self._send(parts)

    def _send(self, parts: Iterable[tuple[int, TensorDict]]) -> None:
        calls = [(number, self.agent_loop_workers[number].generate_sequences.remote(part)) for number, part in parts]
        for number, call in calls:
            try:
                # The first call also waits until the worker has started.
                ray.get(call, timeout=self._receipt_timeout_s)
            except (RayActorError, GetTimeoutError) as error:
                # The worker may hang, or be alive and unreachable. Kill it, so that its death is detected.
                logger.warning("agent loop worker %d did not receive its prompts: %s", number, error)
                ray.kill(self.agent_loop_workers[number])

    def dead_workers(self) -> list[int]:
        """Return the numbers of the workers that have died and are not replaced yet."""
        dead, _ = ray.wait(self._deaths, num_returns=len(self._deaths), timeout=0)
        return [number for number, call in enumerate(self._deaths) if call in dead]

    def prompts_of(self, workers: Collection[int]) -> set[str]:
        """Return the uids of the prompts that these workers received. Some of the prompts may be finished."""
        return self._assignments.of(workers)

    def prompt(self, uid: str) -> Any:
        """Return the data of a prompt: one row."""
        return self._assignments.get(uid)[1]

    def replace(self, workers: Collection[int], timeout_s: float) -> None:
        """Start other workers in place of these, and wait until they are ready: they import verl, for some seconds.

        Args:
            workers: the numbers of the workers.
            timeout_s: timeout in seconds for the start of a worker.

        Raises:
            RewardLoopError: a worker did not start.
        """
        left = list(workers)
        for number in left:
            # Also a worker that is only unreachable: it must not write to prompts that are reset.
            ray.kill(self.agent_loop_workers[number])
        for _ in range(MAX_STARTS):
            for number in left:
                self.agent_loop_workers[number] = self._start(number)
            left = [number for number in left if not self._is_ready(number, timeout_s)]
            if not left:
                return
        raise RewardLoopError(
            f"agent loop worker {left[0]} died, and its replacement died {MAX_STARTS} times while it started: see "
            "the log of the worker"
        )

    def _start(self, number: int) -> Any:
        worker = self.agent_loop_workers_class.options(
            name=f"agent_loop_worker_{number}_{uuid4().hex[:8]}",
            # Soft: this node may be lost before the worker has started.
            scheduling_strategy=NodeAffinitySchedulingStrategy(worker_nodes(number + 1)[-1], soft=True),
        ).remote(self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles)
        self._deaths[number] = worker.until_death.remote()
        return worker

    def _is_ready(self, number: int, timeout_s: float) -> bool:
        try:
            ray.get(self.agent_loop_workers[number].__ray_ready__.remote(), timeout=timeout_s)
        except GetTimeoutError as error:
            raise RewardLoopError(
                f"agent loop worker {number} died, and its replacement did not start within {timeout_s:g} s "
                "(reward_loop.worker_start_timeout_s)"
            ) from error
        except RayActorError:
            return False
        return True

    def send_again(self, uids: Collection[str], step: int) -> None:
        """Send the prompts of dead workers to the replacements.

        Raises:
            RewardLoopError: too many workers died while they had one of these prompts.
        """
        self._assignments.count_deaths(uids)
        parts = [self._assignments.get(uid) for uid in uids]
        for _, row in parts:
            assign_non_tensor(row, global_steps=step)
        self._send(parts)
