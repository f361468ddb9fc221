"""Runs verl's command, with control over the start of steps and verl's polling interval.

    python verl_in_turn.py <options>

Environment variables, both optional:

- ``TURNS``: a named pipe. Each step reads one byte from it before it starts, so that two trainings can alternate.
- ``POLL_INTERVALS``: polling intervals of verl's replay buffer, in seconds or ``shipped``, such as ``shipped,0.05``.
  Consecutive steps use them in turn. verl ships with 2.0 s and has no option to change it.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.trainer import main_ppo

from reward_loop.verl.run import task_runner


def in_turn(runner: Any) -> Any:
    """Return the task runner as a Ray actor class that waits for its turn before each step."""

    class TaskRunner(runner.__ray_actor_class__):
        def init_agent_loop_manager(self) -> None:
            """Install the hook before each step. Called after the trainer is created and before training."""
            trainer, begin = self.trainer, self.trainer.on_step_begin
            turns = os.open(os.environ["TURNS"], os.O_RDONLY) if "TURNS" in os.environ else None
            intervals = [text for text in os.environ.get("POLL_INTERVALS", "").split(",") if text]
            shipped = trainer.replay_buffer.poll_interval

            def begin_step() -> None:
                if turns is not None and not os.read(turns, 1):
                    raise RuntimeError("the pipe of turns was closed")
                if intervals:
                    interval = intervals[(trainer.global_steps - 1) % len(intervals)]
                    trainer.replay_buffer.poll_interval = shipped if interval == "shipped" else float(interval)
                begin()

            trainer.on_step_begin = begin_step
            super().init_agent_loop_manager()

    return ray.remote(TaskRunner)


def main() -> None:
    """Run the command."""
    task_runner.TaskRunner = in_turn(task_runner.TaskRunner)  # where an option turns reward_loop on
    main_ppo.TaskRunnerV1 = in_turn(main_ppo.TaskRunnerV1)
    main_ppo.main()


if __name__ == "__main__":
    main()
