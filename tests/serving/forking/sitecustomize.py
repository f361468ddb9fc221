"""On ``PYTHONPATH``, this module lets the servers of engines fork their processes, whose imports would take 10 s each.

vLLM itself forks on GPUs, and spawns on CPUs; SGLang spawns its processes.
"""

import multiprocessing

_get_context, _set_start_method = multiprocessing.get_context, multiprocessing.set_start_method


def get_context(method=None):
    return _get_context("fork" if method == "spawn" else method)


def set_start_method(method, force=False):
    _set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.get_context, multiprocessing.set_start_method = get_context, set_start_method
