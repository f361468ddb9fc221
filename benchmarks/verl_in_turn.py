"""The entry points of verl and of reward_loop, unchanged but for when steps begin, and how often verl polls.

    python benchmarks/verl_in_turn.py (ours | verl) <options>

``$TURNS`` is a named pipe: a step begins when a byte can be read from it, so that two trainings can take turns. Without
it, nothing waits. ``$POLL_INTERVALS`` has some intervals at which verl's replay buffer is polled, in seconds or
``shipped``, such as ``shipped,0.05``: steps have them in turn. It is 2.0 s as shipped, and no option of verl's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from verl.trainer import main_ppo

from reward_loop.verl import main_ppo as ours
from reward_loop.verl import task_runner
from reward_loop.verl.cpu.preload import preloaded


def in_turn(runner: Any) -> Any:
    """A task runner's class, as the actor that asks for its turn before each step."""

    class TaskRunner(runner.__ray_actor_class__):
        def init_agent_loop_manager(self) -> None:
            """Called between making the trainer and training."""
            trainer, begin = self.trainer, self.trainer.on_step_begin
            turns = os.open(os.environ["TURNS"], os.O_RDONLY) if "TURNS" in os.environ else None
            intervals = [text for text in os.environ.get("POLL_INTERVALS", "").split(",") if text]
            shipped = trainer.replay_buffer.poll_interval

            def begin_step() -> None:
                if turns is not None and not os.read(turns, 1):
                    raise RuntimeError("nobody gives turns any more")
                if intervals:
                    interval = intervals[(trainer.global_steps - 1) % len(intervals)]
                    trainer.replay_buffer.poll_interval = shipped if interval == "shipped" else float(interval)
                begin()

            trainer.on_step_begin = begin_step
            super().init_agent_loop_manager()

    return ray.remote(TaskRunner)


def main() -> None:
    """The command."""
    trainer = sys.argv.pop(1)
    if trainer == "ours":
        task_runner.TaskRunner = in_turn(task_runner.TaskRunner)
        ours.main()
    else:
        main_ppo.TaskRunnerV1 = in_turn(main_ppo.TaskRunnerV1)
        with preloaded() as executable:  # it starts sooner; its steps are as they were
            sys.argv.append(f"+ray_kwargs.ray_init.runtime_env.py_executable='{executable}'")
            main_ppo.main()


if __name__ == "__main__":
    main()
