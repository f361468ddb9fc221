"""Counts what a sample passes in a reward worker: modules of ours, calls, and switches from one module to another.

    python -m benchmarks.path [--calls]

A manager with limits, retries and records scores rows in the format of verl's agent loop, one after the other. Calls of
Python functions count, and so does each time that a coroutine continues; comprehensions do not. Of several samples, the
one with the fewest calls is reported: what happens once in a while is not part of the path. Nor is the thread of the
records' writer.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import _calls
from benchmarks._calls import Call
from reward_loop import NaiveRewardLoopManager
from reward_loop.scoring import load_function
from reward_loop.testing import FakeJudge

WARM_UP = 5
"""Samples that are scored first: they load, start and connect what later ones use."""
COUNTED = 5
AFTER_S = 0.1
"""For this long, what follows an answer still belongs to its sample: a worker process restores what a call changed."""

OPTIONS: dict[str, Any] = {"limits": {"default": {"max_concurrent": 64, "requests_per_minute": 1_000_000}}}

FUNCTIONS = r"""
from reward_loop.client import Judge, Number

JUDGE = Judge("Rate it: {{answer}}\nEnd with `Score: N`.", Number(1, 10), model="fake-judge")

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 1.0

async def judge(solution_str, reward_router_address):
    return (await JUDGE(reward_router_address, answer=solution_str)).score
"""

SYNC = """
def sync(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


class Tokenizer:
    """Decodes every answer as the same text."""

    is_fast = True
    """As in verl's runs: the tokenizer is one of the package `tokenizers`."""

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "42"


def row(number: int) -> Any:
    """Return a rollout with the fields of a ``DataProto``, without torch."""

    def column(value: Any) -> Any:
        array = np.empty(1, dtype=object)
        array[0] = value
        return array

    responses = np.ones((1, 8), dtype=np.int64)
    columns = {"data_source": "test", "reward_model": {"ground_truth": "42"}, "extra_info": {}, "uid": str(number)}
    return SimpleNamespace(
        batch={"responses": responses, "attention_mask": np.ones((1, 12), dtype=np.int64)},
        non_tensor_batch={name: column(value) for name, value in {**columns, "response_len": 8}.items()},
    )


async def score(function: Any, address: str, options: dict[str, Any], calls: list[Call]) -> list[tuple[float, float]]:
    """Score samples one after the other, traced; return when the counted ones began and ended."""
    manager = NaiveRewardLoopManager(
        {**OPTIONS, **options}, tokenizer=Tokenizer(), compute_score=function, reward_router_address=address
    )
    spans = []
    _calls.trace(calls)
    for number in range(WARM_UP + COUNTED):
        began = time.monotonic()
        reward = await manager.run_single(row(number))
        await asyncio.sleep(AFTER_S)
        spans.append((began, time.monotonic()))
        assert reward["reward_extra_info"]["reward_outcome"] == "scored", reward
    _calls.stop()
    await asyncio.to_thread(manager.close)
    return spans[WARM_UP:]


@contextlib.contextmanager
def traced_children(folder: Path) -> Iterator[None]:
    """Have Python processes that start in the block write their calls to the folder."""
    shutil.copy(_calls.__file__, folder / "sitecustomize.py")
    before = dict(os.environ)
    os.environ[_calls.FOLDER] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), before.get("PYTHONPATH", str(Path.cwd()))])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fewest(calls: list[Call], spans: list[tuple[float, float]]) -> list[Call]:
    """Return the calls of the sample with the fewest, in order."""
    of_samples = [sorted(call for call in calls if began <= call.time <= ended) for began, ended in spans]
    return min(of_samples, key=len)


def figures(calls: list[Call]) -> dict[str, int]:
    """Return the number of modules, calls and switches."""
    modules = [call.module for call in calls]
    switches = sum(a != b for a, b in pairwise(modules))
    return {"modules": len(set(modules)), "calls": len(calls), "switches": switches}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="also print each call")
    arguments = parser.parse_args()
    paths: dict[str, list[Call]] = {}
    with tempfile.TemporaryDirectory() as name, FakeJudge("Score: 7") as judge, traced_children(Path(name)):
        folder = Path(name)
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "rules.py").write_text(SYNC)
        in_process = {"isolation": "process", "max_processes": 1}
        for way, function, options in (
            ("async, with a limit", "functions.py:asynchronous", {}),
            ("async with a judge, with a limit", "functions.py:judge", {}),
            ("sync, in a thread", "rules.py:sync", {}),
            ("sync, in a worker process", "rules.py:sync", in_process),
        ):
            calls: list[Call] = []
            records = {"log_dir": str(folder / function.partition(":")[2])}
            loaded = load_function(f"{folder}/{function}")
            spans = asyncio.run(score(loaded, judge.address, {**records, **options}, calls))
            paths[way] = fewest(calls, spans)
        children = _calls.read(folder)
        assert children, "the worker process was not traced"
        paths["the same, in that process"] = fewest(children, spans)
    print(f"{'a sample of a function that is':40}{'modules':>9}{'calls':>9}{'switches':>9}")
    for way, path in paths.items():
        print(f"{way:40}" + "".join(f"{value:>9}" for value in figures(path).values()))
        if arguments.calls:
            print(*(f"    {call.module} {call.function}" for call in path), sep="\n")
    print(json.dumps({way: figures(path) for way, path in paths.items()}))


if __name__ == "__main__":
    main()
