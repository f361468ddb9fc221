"""verl's own ``main_ppo``, unchanged but for the interval at which its replay buffer is polled.

It is 2.0 s as shipped, and no option of verl's configuration. ``$POLL_INTERVALS`` has some, in seconds or ``shipped``,
such as ``shipped,0.05``: steps have them in turn.
"""

from __future__ import annotations

import os
import sys

import ray
from verl.trainer import main_ppo

from reward_loop.verl.cpu.preload import preloaded


class TaskRunner(main_ppo.TaskRunnerV1.__ray_actor_class__):
    """Sets the interval at the beginning of each step."""

    def init_agent_loop_manager(self) -> None:
        """verl calls this between making the trainer and training."""
        trainer, intervals = self.trainer, os.environ["POLL_INTERVALS"].split(",")
        begin, shipped = trainer.on_step_begin, trainer.replay_buffer.poll_interval

        def begin_step() -> None:
            interval = intervals[(trainer.global_steps - 1) % len(intervals)]
            trainer.replay_buffer.poll_interval = shipped if interval == "shipped" else float(interval)
            begin()

        trainer.on_step_begin = begin_step
        super().init_agent_loop_manager()


if __name__ == "__main__":
    main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
    with preloaded() as executable:  # it starts sooner; its steps are as they were
        sys.argv.append(f"+ray_kwargs.ray_init.runtime_env.py_executable='{executable}'")
        main_ppo.main()
