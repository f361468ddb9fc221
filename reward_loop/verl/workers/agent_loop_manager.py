"""verl's agent loop manager with this library's workers, whose death ends the run with its cause.

verl does not notice the death of a worker while it waits for rollouts: the trainer would wait indefinitely.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from tensordict import TensorDict
from typing_extensions import override
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from reward_loop._util.text import counted, listing
from reward_loop.errors import RewardLoopError
from reward_loop.verl.tq_rows import unfinished_prompts
from reward_loop.verl.workers.agent_loop import RewardAgentLoopWorker

AGENT_LOOP_MANAGER = "reward_loop.verl.workers.agent_loop_manager.RewardAgentLoopManager"

NAMED_PROMPTS = 5
"""The largest number of prompts that an error message names."""


class RewardAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager, which raises an error when a worker has died.

    Finished rollouts and their rewards are in TransferQueue, but those of a dead worker that were in flight are lost.
    So the run ends, and resumes from its checkpoint (:mod:`reward_loop.verl.trainer.resume`).
    """

    worker_class: ClassVar[Any] = RewardAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After verl's constructor, which sets its own class.
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self._deaths: list[Any] = []
        """For each worker, a call that fails when the worker dies."""
        self._worker_of: dict[str, int] = {}
        """Prompt uid -> the number of the worker that received it."""
        self._receipt_timeout_s = OmegaConf.select(self.config, "reward_loop.worker_start_timeout_s", default=300.0)

    @override
    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        self._deaths = [worker.until_death.remote() for worker in self.agent_loop_workers]

    @override
    def generate_sequences(self, prompts: TensorDict) -> None:
        """Send prompts to the workers, in equal parts.

        Raises:
            RewardLoopError: a worker has died, or did not receive its part in time.
        """
        unfinished = set().union(*unfinished_prompts().values())
        self._worker_of = {uid: worker for uid, worker in self._worker_of.items() if uid in unfinished}
        parts = prompts.chunk(len(self.agent_loop_workers))
        self._worker_of |= {uid: number for number, part in enumerate(parts) for uid in part["uid"]}
        calls = [
            worker.generate_sequences.remote(part)
            for worker, part in zip(self.agent_loop_workers, parts, strict=False)  # fewer prompts than workers
        ]
        for number, call in enumerate(calls):
            try:
                # The first call also waits until the worker has started.
                ray.get(call, timeout=self._receipt_timeout_s)
            except (RayActorError, OutOfMemoryError) as error:
                raise self._death(number) from error
            except GetTimeoutError as error:
                raise RewardLoopError(
                    f"agent loop worker {number} did not receive its prompts within {self._receipt_timeout_s:g} s "
                    "(reward_loop.worker_start_timeout_s): see the log of the worker"
                ) from error

    def check_workers(self) -> None:
        """Raise an error if a worker has died, without waiting.

        Raises:
            RewardLoopError: it names the worker and its unfinished prompts.
        """
        dead, _ = ray.wait(self._deaths, num_returns=1, timeout=0)
        if dead:
            raise self._death(self._deaths.index(dead[0]))

    def _death(self, worker: int) -> RewardLoopError:
        unfinished = set().union(*unfinished_prompts().values())
        prompts = sorted(uid for uid, number in self._worker_of.items() if number == worker and uid in unfinished)
        more = ", ..." if len(prompts) > NAMED_PROMPTS else ""
        return RewardLoopError(
            f"agent loop worker {worker} died with {counted(len(prompts), 'unfinished prompt')} "
            f"({listing(prompts[:NAMED_PROMPTS])}{more}): does the agent loop or one of its tools crash the "
            "interpreter, or run out of memory? Run the same command again: it resumes from the last checkpoint "
            "(trainer.save_freq), and generates prompts without all scores again"
        )
