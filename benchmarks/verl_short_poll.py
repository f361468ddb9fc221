"""verl's own ``main_ppo``, unchanged but for the interval at which its replay buffer is polled, in ``$POLL_INTERVAL``.

It is 2.0 s as shipped, and no option of verl's configuration.
"""

from __future__ import annotations

import os

import ray
from verl.trainer import main_ppo


class TaskRunner(main_ppo.TaskRunnerV1.__ray_actor_class__):
    """Shortens the interval once the trainer is there."""

    def init_agent_loop_manager(self) -> None:
        """verl calls this between making the trainer and training."""
        self.trainer.replay_buffer.poll_interval = float(os.environ["POLL_INTERVAL"])
        super().init_agent_loop_manager()


if __name__ == "__main__":
    main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
    main_ppo.main()
