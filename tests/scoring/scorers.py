"""Reward functions that an answer can break. They run in worker processes too, so their imports are few."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

forged = False
pool: ProcessPoolExecutor | None = None
calls: list[str] = []


def is_right(solution_str: str, ground_truth: str) -> float:
    calls.append(solution_str)
    return float(solution_str.strip() == f"#### {ground_truth}")


def is_right_within_a_limit(solution_str: str, ground_truth: str) -> float:
    import reward_loop

    with reward_loop.limit("judge") as lease:
        lease.used(cost=1.0)
        return float(solution_str.strip() == f"#### {ground_truth}")


def can_be_forged(solution_str: str, ground_truth: str) -> float:
    """Accepts every answer after one that forges it, as verl's prime_math does without the guard."""
    global forged
    forged = forged or solution_str == "forge"
    if solution_str == "end":
        os._exit(0)
    return 1.0 if forged else is_right(solution_str, ground_truth)


def _compare(answer: str, truth: str) -> float:
    if answer == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(answer.strip() == f"#### {truth}")


def dies_quietly(solution_str: str, ground_truth: str) -> float:
    """Returns 0 after a process of its pool has died, as verl's math_verify does without the guard."""
    global pool
    pool = pool or ProcessPoolExecutor(1)
    try:
        return pool.submit(_compare, solution_str, ground_truth).result()
    except BrokenProcessPool:
        return 0.0


def cannot_be_sent():
    """Return a function that cannot run in a worker process."""
    import threading

    lock = threading.Lock()

    def compute_score(solution_str: str, ground_truth: str) -> float:
        with lock:
            return can_be_forged(solution_str, ground_truth)

    return compute_score
