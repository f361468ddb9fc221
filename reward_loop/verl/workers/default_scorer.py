"""verl's default function, isolated: some of its scorers evaluate what the policy wrote.

This module imports them: so each process that is forked for a call has them.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

from reward_loop.scoring import isolated
from reward_loop.verl.workers.own_scorers import guard

guard()

for _name in ("gsm8k", "math_reward", "math_dapo", "prime_math", "prime_code", "geo3k", "search_r1_like_qa_em"):
    with contextlib.suppress(ImportError):  # some need packages that only their data sets need
        importlib.import_module(f"verl.utils.reward_score.{_name}")


@isolated
def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_requests: int | None = None,
    **options: Any,
) -> Any:
    """Return the score of verl's function of the same name. Arguments are those of verl.

    Only ``sandbox_requests`` is not: the largest number of requests of this call to a sandbox at a time.
    """
    from verl.utils.reward_score import default_compute_score as of_verl

    if sandbox_requests is not None:
        options["concurrent_semaphore"] = threading.Semaphore(sandbox_requests)
    return of_verl(data_source, solution_str, ground_truth, extra_info, **options)
