"""verl's own ``main_ppo``, unchanged but for the interval at which its replay buffer is polled, in ``$POLL_INTERVAL``.

It is 2.0 s as shipped, and no option of verl's configuration. The first ``$SHIPPED_STEPS`` steps are as shipped.
"""

from __future__ import annotations

import os
import sys

import ray
from verl.trainer import main_ppo

from reward_loop.verl.cpu.preload import preloaded


class TaskRunner(main_ppo.TaskRunnerV1.__ray_actor_class__):
    """Shortens the interval once the trainer has made so many steps."""

    def init_agent_loop_manager(self) -> None:
        """verl calls this between making the trainer and training."""
        trainer = self.trainer
        begin, shipped = trainer.on_step_begin, int(os.environ["SHIPPED_STEPS"])

        def begin_step() -> None:
            if trainer.global_steps > shipped:
                trainer.replay_buffer.poll_interval = float(os.environ["POLL_INTERVAL"])
            begin()

        trainer.on_step_begin = begin_step
        super().init_agent_loop_manager()


if __name__ == "__main__":
    main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
    with preloaded() as executable:  # it starts sooner; its steps are as they were
        sys.argv.append(f"+ray_kwargs.ray_init.runtime_env.py_executable='{executable}'")
        main_ppo.main()
