"""Starts a Ray worker, as Ray's ``setup_worker.py`` does, but without importing Ray, which takes 1.4 s of CPU time.

Ray passes the worker's command, and options of which only ``--serialized-runtime-env-context`` is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, worker = parser.parse_known_args()
    context = json.loads(known.serialized_runtime_env_context)
    os.environ.update(context.get("env_vars") or {})
    command = [*shlex.split(context.get("py_executable") or sys.executable), *worker]
    os.execvp(command[0], command)
