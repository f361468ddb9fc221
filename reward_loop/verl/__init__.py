"""The integration with verl.

No file of verl is changed. Almost everything here is a subclass of a class of verl, or registered with verl, so that
the user's own classes and recipes still work. Where verl has no such place, an object is replaced in memory:

======================================================== ===============================================================
Object                                                   Replaced in
======================================================== ===============================================================
``auto_set_device``, ``run_ppo`` of verl's command       ``hydra_plugins/``, in the process of the command
the trainer class that is registered for the mode        `run/task_runner.py`, in the trainer's process
``RewardLoopManager`` in the module of verl's trainer    `trainer/`, while the trainer's ``_setup`` runs
``update_actor``, ``train_mini_batch`` of worker groups  `trainer/`, on the objects of the run
functions of verl's ``prime_math`` and ``math_verify``   `workers/own_scorers.py`, in processes that score
======================================================== ===============================================================

A release of verl may change any of them, so this library works with one release of verl (`installed.py`).

This module must not import verl: verl chooses its platform at import, so it is imported late.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("verl") is None:
    raise ImportError("verl is not installed; from a clone of reward_loop: pip install '.[verl]'", name=__name__)
