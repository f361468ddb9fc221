"""Many samples through a judge that fails in every way at once: does each end exactly once, and is nothing left?

    python benchmarks/soak.py [--quick] [--samples N]

100,000 samples (5,000 with ``--quick``) ask a judge in a process of its own. It answers 429 with ``Retry-After``, 503
and 400, drops connections, sends broken JSON and empty lists, and stalls. Beside that, the function raises, hangs,
returns NaN and None for some samples. Limits, retries, deadlines and records are on. Afterwards the outcomes must add
up, those that do not depend on the judge must be as expected, and no thread, process, socket or descriptor may be left.
Memory is compared between a fifth of the way and the end; limits count over 4 seconds here instead of a minute, as what
they remember of the calls in that time takes memory, too, until the first are forgotten. Ends with one JSON line; exit
status 1 if anything is wrong.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import reward_loop  # noqa: E402
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample  # noqa: E402
from reward_loop.client.http import post, shared_session  # noqa: E402
from reward_loop.limits.local import LocalLimits  # noqa: E402

CONCURRENCY = 256
PERIOD_S = 4.0
SETTLING_S = 30.0
"""Seconds in which what is left must be gone: the watchdog may just be answering `reward-loop stuck`."""
OWN = {0: "raises", 1: "none", 2: "nan", 3: "hangs"}
"""What the function does by itself, by the sample's number modulo 100."""


def judge() -> None:
    """The judge's process: prints its address, and serves until its standard input ends."""
    from reward_loop.testing import BadJson, Drop, FakeJudge, NoChoices, Stall, Status

    faults = {
        Status(429, retry_after=0.01): 0.10,
        Status(503): 0.03,
        Status(400): 0.02,
        Drop(): 0.03,
        BadJson(): 0.02,
        NoChoices(): 0.02,
        Stall(): 0.005,
    }
    with FakeJudge("1", faults=faults, latency=(0.0, 0.01)) as fake:
        fake.requests = _Forgetful()  # type: ignore[assignment]
        print(fake.address, flush=True)
        sys.stdin.read()


class _Forgetful(list[Any]):
    def append(self, item: Any) -> None:
        """Keep nothing: a hundred thousand requests are a lot."""


@contextlib.contextmanager
def running_judge() -> Iterator[str]:
    """Start the judge; its address."""
    command = [sys.executable, __file__, "--judge"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


async def compute_score(extra_info: dict[str, Any], reward_router_address: str) -> float | None:
    """Asks the judge, unless the sample is one of those with which something else goes wrong."""
    own = OWN.get(extra_info["number"] % 100)
    if own == "raises":
        raise ValueError("this one is broken")
    if own == "none":
        return None
    if own == "nan":
        return float("nan")
    if own == "hangs":
        await asyncio.Event().wait()
    async with reward_loop.limit("judge", tokens=10) as lease:
        answer = await post(reward_router_address, "/v1/chat/completions", {"messages": []}, timeout=None)
        lease.used(tokens=answer["usage"]["total_tokens"], cost=0.001)
        return float(answer["choices"][0]["message"]["content"])


def left() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "threads": threading.active_count(),
        "processes": len(children),
        "descriptors": len(descriptors),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
    }


def resident_mb() -> float:
    """Resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines_in(folder: Path) -> int:
    """How many lines the files of a folder have."""
    return sum(len(file.read_bytes().splitlines()) for file in folder.iterdir())


async def run(samples: int, address: str, records: str) -> dict[str, Any]:
    """Score them all; the outcomes, by what the function was to do, and memory on the way."""
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
    state = (await manager.limits.status())["limits"]
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
    """What is wrong, in words."""
    samples, kinds = result["samples"], result["by_kind"]
    found = []
    if result["ended_once"] != samples:
        found.append(f"{samples - result['ended_once']} samples did not end exactly once")
    if sum(result["outcomes"].values()) != samples or result["records"] != samples:
        found.append(f"outcomes {result['outcomes']} and {result['records']} records do not add up to {samples}")
    expected = {"raises": "failed", "none": "unscored", "nan": "failed", "hangs": "failed"}
    found += [f"{own}: {kinds[own]}" for own, outcome in expected.items() if set(kinds[own]) != {outcome}]
    if kinds["asks"].get("scored", 0) < 0.5 * sum(kinds["asks"].values()):
        found.append(f"of those who asked the judge, too few have a score: {kinds['asks']}")
    if result["places_left"]:
        found.append(f"{result['places_left']} places within limits were not given back")
    found += [f"{after[what] - before[what]} {what} left" for what in before if after[what] > before[what]]
    if result["memory_mb"] > 1.1 * result["memory_mb_at_a_fifth"] + 5:
        found.append(f"memory grew from {result['memory_mb_at_a_fifth']} to {result['memory_mb']} MB")
    return found


class ShortMemory(LocalLimits):
    """A job whose limits count over a few seconds."""

    def __init__(self, options: RewardLoopConfig) -> None:
        super().__init__(options, period=PERIOD_S)


def soak(samples: int) -> tuple[dict[str, Any], list[str]]:
    """Run it: the figures, and what is wrong."""
    short = mock.patch("reward_loop.limits.client.LocalLimits", ShortMemory)
    with short, tempfile.TemporaryDirectory() as records, running_judge() as address:
        asyncio.run(run(CONCURRENCY, address, f"{records}/first"))  # whatever is made once is made now
        before = left()
        result = asyncio.run(run(samples, address, f"{records}/second"))
        # The thread that writes records of a directory stays with it.
        before["threads"] += 1
        after, deadline = left(), time.monotonic() + SETTLING_S
        while any(after[what] > before[what] for what in before) and time.monotonic() < deadline:
            time.sleep(0.1)
            after = left()
    return result, problems(result, before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5,000 samples")
    parser.add_argument("--samples", type=int, help="how many; by default 100,000")
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
