"""Scores many samples with a judge that fails in every way at once, and checks that each ends exactly once.

    python -m benchmarks.soak [--quick] [--samples N]

100,000 samples (5,000 with ``--quick``) call a judge in another process. Limits, retries, timeouts and records are
enabled. Faults:

- The judge returns status 429 with ``Retry-After``, 503 and 400, drops connections, sends malformed JSON and empty
  lists, and stalls.
- For some samples, the function raises an error, hangs, or returns NaN or None.

Checks at the end:

- Every sample ended exactly once, and the outcomes and records add up.
- Outcomes that do not depend on the judge are as expected.
- No thread, process, socket or file descriptor is left.
- Memory at the end is about the same as after a fifth of the samples. For this check, limits count over 4 seconds
  instead of a minute: they store the calls of that period, which would also let memory grow at first.

The last line of the output is JSON. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import reward_loop
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client.http import post, shared_session
from reward_loop.limits.local import LocalLimits

CONCURRENCY = 256
PERIOD_S = 4.0
SETTLING_S = 30.0
"""Maximum time in seconds until all resources are released."""
OWN = {0: "raises", 1: "none", 2: "nan", 3: "hangs"}
"""The fault of the function, by the sample's number modulo 100."""


def judge() -> None:
    """Run the judge process: print its address, and serve until stdin is closed."""
    from reward_loop.testing import BadJson, Drop, FakeJudge, Stall, Status

    faults = {
        Status(429, retry_after=0.01): 0.10,
        Status(503): 0.03,
        Status(400): 0.02,
        Drop(): 0.03,
        BadJson(): 0.04,
        Stall(): 0.005,
    }
    with FakeJudge("1", faults=faults, latency=(0.0, 0.01)) as fake:
        fake.requests = _Forgetful()  # type: ignore[assignment]
        print(fake.address, flush=True)
        sys.stdin.read()


class _Forgetful(list[Any]):
    def append(self, item: Any) -> None:
        """Discard the request: storing 100,000 of them would take much memory."""


@contextlib.contextmanager
def running_judge() -> Iterator[str]:
    """Start the judge process; yields its address."""
    command = [sys.executable, "-m", "benchmarks.soak", "--judge"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


async def compute_score(extra_info: dict[str, Any], reward_router_address: str) -> float | None:
    """Call the judge, unless the sample is one for which the function itself fails."""
    own = OWN.get(extra_info["number"] % 100)
    if own == "raises":
        raise ValueError("this one is broken")
    if own == "none":
        return None
    if own == "nan":
        return float("nan")
    if own == "hangs":
        await asyncio.Event().wait()
    async with (
        reward_loop.limit("judge", tokens=10) as lease,
        post(reward_router_address, "/v1/chat/completions", {"messages": []}, timeout=None) as (answer, _),
    ):
        lease.used(tokens=answer["usage"]["total_tokens"], cost=0.001)
        return float(answer["choices"][0]["message"]["content"])


def left() -> dict[str, int]:
    """Return the number of threads, child processes, descriptors and sockets of this process."""
    gc.collect()
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "threads": threading.active_count(),
        "processes": len(children),
        "descriptors": len(descriptors),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
    }


def resident_mb() -> float:
    """Return the resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines_in(folder: Path) -> int:
    """Return the number of lines in all files of rows in a folder."""
    return sum(len(file.read_bytes().splitlines()) for file in folder.glob("*.jsonl"))


async def run(samples: int, address: str, records: str) -> dict[str, Any]:
    """Score all samples, and return the figures: outcomes by fault of the function, records, and memory."""
    config = RewardLoopConfig(
        timeout=1.0,
        max_failed_share=1.0,
        log_dir=records,
        watchdog_s=None,
        limits={"default": {"max_concurrent": 200}, "judge": {"max_concurrent": 100, "tokens_per_minute": 10**9}},
        retry={"initial_wait": 0.005, "max_wait": 0.05},
    )
    manager = NaiveRewardLoopManager(config, compute_score=compute_score, reward_router_address=address)
    numbers = iter(range(samples))
    outcomes: dict[str, Counter[str]] = {own: Counter() for own in (*OWN.values(), "asks")}
    ended = bytearray(samples)
    memory: list[float] = []

    async def worker() -> None:
        for number in numbers:
            reward = await manager.run_single(RewardSample("", uid=str(number), extra_info={"number": number}))
            ended[number] += 1
            own = OWN.get(number % 100, "asks")
            outcomes[own][reward["reward_extra_info"]["reward_outcome"]] += 1
            if number % max(1, samples // 50) == 0:
                memory.append(resident_mb())

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    seconds = time.perf_counter() - began
    session = await shared_session()
    await session.close()
    manager.close()
    assert isinstance(manager.limits, LocalLimits)
    state = manager.limits.snapshot()["limits"]
    assert manager.records is not None
    await asyncio.to_thread(manager.records.flush)
    written = await asyncio.to_thread(lines_in, Path(records))
    return {
        "samples": samples,
        "samples_per_s": round(samples / seconds),
        "ended_once": ended.count(1),
        "outcomes": dict(sum(outcomes.values(), Counter())),
        "by_kind": {own: dict(counts) for own, counts in outcomes.items()},
        "records": written,
        "places_left": sum(limit["in_flight"] + limit["waiting"] for limit in state.values()),
        "memory_mb_at_a_fifth": round(memory[len(memory) // 5], 1),
        "memory_mb": round(memory[-1], 1),
    }


def problems(result: dict[str, Any], before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return a description of each failed check."""
    samples, kinds = result["samples"], result["by_kind"]
    found = []
    if result["ended_once"] != samples:
        found.append(f"{samples - result['ended_once']} samples did not end exactly once")
    if sum(result["outcomes"].values()) != samples or result["records"] != samples:
        found.append(f"outcomes {result['outcomes']} and {result['records']} records do not add up to {samples}")
    expected = {"raises": "failed", "none": "unscored", "nan": "failed", "hangs": "failed"}
    found += [f"{own}: {kinds[own]}" for own, outcome in expected.items() if set(kinds[own]) != {outcome}]
    # How many depends on the machine: on a busy one, more calls than the judge stalls take longer than the timeout.
    if not kinds["asks"].get("scored"):
        found.append(f"no sample that asked the judge has a score: {kinds['asks']}")
    if result["places_left"]:
        found.append(f"{result['places_left']} permits were not released")
    found += [f"{after[what] - before[what]} {what} left" for what in before if after[what] > before[what]]
    if result["memory_mb"] > 1.1 * result["memory_mb_at_a_fifth"] + 5:
        found.append(f"memory grew from {result['memory_mb_at_a_fifth']} to {result['memory_mb']} MB")
    return found


class ShortMemory(LocalLimits):
    """Limits that count requests and tokens over `PERIOD_S` instead of a minute."""

    def __init__(self, options: RewardLoopConfig) -> None:
        super().__init__(options, period=PERIOD_S)


def soak(samples: int) -> tuple[dict[str, Any], list[str]]:
    """Run the benchmark, and return the figures and the failed checks."""
    short = mock.patch("reward_loop.managers.base.LocalLimits", ShortMemory)
    with short, tempfile.TemporaryDirectory() as records, running_judge() as address:
        asyncio.run(run(CONCURRENCY, address, f"{records}/first"))  # creates all resources that exist once per process
        before = left()
        result = asyncio.run(run(samples, address, f"{records}/second"))
        # The records writer of the second directory keeps its thread.
        before["threads"] += 1
        after, deadline = left(), time.monotonic() + SETTLING_S
        while any(after[what] > before[what] for what in before) and time.monotonic() < deadline:
            time.sleep(0.1)
            after = left()
    return result, problems(result, before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5,000 samples")
    parser.add_argument("--samples", type=int, help="number of samples (100,000)")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        judge()
        return
    result, wrong = soak(options.samples or (5_000 if options.quick else 100_000))
    for key, value in result.items():
        print(f"{key:24}{value}")
    for problem in wrong:
        print(f"WRONG: {problem}")
    print(json.dumps({**result, "problems": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
