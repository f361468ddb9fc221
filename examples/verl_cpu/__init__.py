"""verl on a CPU: a platform, an FSDP2 engine and a rollout server, to debug a reward pipeline on a laptop.

``python -m examples.verl_cpu OPTION=VALUE ...`` runs verl's trainer with the options of `cpu.yaml`. verl loads `plugin`
in every process through ``VERL_USE_EXTERNAL_MODULES``. This module must not import verl: Ray may unpickle an object of
this package before verl has finished importing.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent

ARGUMENTS = ("--config-dir", str(HERE), "--config-name", "cpu")
"""What verl's command needs to find `cpu.yaml`."""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "examples.verl_cpu.plugin",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default timeout is 30 s, which can be too short on a busy laptop.
    "RAY_agent_register_timeout_ms": "300000",
    # By default, Ray starts one worker for each core at once. A run never uses them: they lack its `runtime_env`.
    "RAY_prestart_worker_first_driver": "0",
    # By default, Ray runs workers at nice 15, so all other processes of the machine have priority.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
"""The environment variables of a run, in all of its processes."""


def environment() -> dict[str, str]:
    """Return `ENVIRONMENT` with the values that the user has set, and a ``PYTHONPATH`` for this package."""
    given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
    return ENVIRONMENT | given | {"PYTHONPATH": path}
