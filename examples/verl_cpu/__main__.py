"""verl's command, ``python -m verl.trainer.main_ppo``, with the environment and the options of a run on a CPU."""

from __future__ import annotations

import os
import runpy
import sys

from examples.verl_cpu import ARGUMENTS, environment

if __name__ == "__main__":
    os.environ.update(environment())
    sys.argv[1:1] = ARGUMENTS
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
