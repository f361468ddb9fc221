"""Compares the router with verl's NaiveRouter, sglang-router, smg, vllm-router and nginx.

    python -m benchmarks.router [--quick] [--instructions] [--peers-python PATH]

All run on this machine, in short alternating rounds (A B C A B C), so that other load affects all of them equally. A
peer that is not installed is skipped, and a line names it. The last line of the output is JSON. A full run ends with
status 1 if it misses one of `TARGETS`; rounds of a second are too short for that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.router_load import BODY, allow_many_files
from benchmarks.router_servers import CONNECTIONS, LOAD, PACKAGES, PEERS, Servers, cpu_s, peak_mb, rss_mb, say, stop

SLOW_REQUESTS = 4096
SLOW_S = 2.0
RESTART_S = 10.0
"""Seconds in which the servers answer, in the test that kills the router: all calls must be in flight by then."""


TARGETS = {
    "vs_sglang_router": ("at least", 1.5),
    "cpu_vs_sglang_router": ("at most", 0.55),
    "instructions_per_request": ("at most", 150_000),
}
"""Requests per second and processor time for a request in comparison with sglang-router, medians of paired rounds; and
the instructions in user space for a request."""
COUNTED_REQUESTS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="shorter rounds, no bursts of peers, no memory test: under 50 s"
    )
    parser.add_argument("--rounds", type=int, help="rounds of the throughput test (default: 10; quick: 8 s in all)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the memory test (%(default)s)")
    parser.add_argument("--peers-python", metavar="PATH", help=f"path of a Python with {PACKAGES}")
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="also count the processor's instructions for a request (perf, or a minute of callgrind)",
    )
    parser.add_argument(
        "--only", choices=("restart", "instructions"), help="only the test that kills the router; only the count"
    )
    parser.add_argument("--skip-naive", action="store_true", help="leave out verl's NaiveRouter")
    args = parser.parse_args()
    allow_many_files()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(Servers(Path(folder), stack))
        results = bench.run(args)
    missed = [] if args.quick else [line for line in map(partial(miss, results), TARGETS) if line]
    for line in missed:
        say(f"target missed: {line}")
    print(json.dumps(results))
    return 1 if missed else 0


def miss(results: dict[str, Any], name: str) -> str | None:
    """Return the words for a target that a result misses, or ``None``; a result that was not measured misses none."""
    comparison, bound = TARGETS[name]
    value = results.get(name)
    if value is None or (value >= bound if comparison == "at least" else value <= bound):
        return None
    return f"{name} is {value}, and should be {comparison} {bound}"


class Bench:
    """The measurements.

    Args:
        servers: starts the routers and the backends.
    """

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        if args.only == "restart":
            return asyncio.run(self.restart())
        results: dict[str, Any] = {}
        if args.instructions or args.only:
            results |= self.instructions()
        if args.only:
            return results
        say(f"load generator: {'wrk' if self.servers.wrk else 'the built-in uvloop client'}")
        backends = self.servers.instant_backends()
        routers: dict[str, Any] = {}
        starts = []
        tries = 2 if args.quick else 3
        for _ in range(tries):
            url, process, seconds = self.servers.start_own(backends)
            starts.append(seconds)
            if len(starts) < tries:
                stop(process)
        routers["reward_loop"] = url, process
        results["ready_s"] = round(min(starts), 3)
        say(f"ready: our router in {min(starts):.2f} s (the best of {len(starts)} starts)")
        # Started in a thread, because importing verl is slow.
        naive = ThreadPoolExecutor().submit(lambda: None if args.skip_naive else self.servers.start_naive(backends))
        if not args.peers_python:
            say(f"{', '.join(PEERS)} are skipped: --peers-python needs the path of a Python with {PACKAGES}")
        for name in PEERS if args.peers_python else ():
            if peer := self.servers.start_peer(name, args.peers_python, backends):
                routers[name] = peer[:2]
                results[f"ready_{name}_s"] = round(peer[2], 3)
        if self.servers.nginx:
            routers["nginx"] = self.servers.start_nginx_proxy(backends)
        else:
            say("nginx is skipped: it is not installed")
        if started := naive.result():
            routers["naive_router"] = started[:2]
        rounds = args.rounds or (max(1, 8 // len(routers)) if args.quick else 10)
        results |= self.throughput(routers, rounds, 1 if args.quick else 4)
        for _, process in routers.values():
            stop(process)
        results |= self.slow(args)
        results |= self.killed()
        results |= asyncio.run(self.restart())
        if not args.quick:
            results |= self.memory(args.requests)
        return results

    # The measurements

    def throughput(self, routers: dict[str, Any], rounds: int, seconds: int) -> dict[str, Any]:
        measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in routers}
        for url, _ in routers.values():
            self.servers.load(url, 1)
        for _ in range(rounds):
            for name, (url, process) in routers.items():
                before = cpu_s(process.pid)
                done = self.servers.load(url, seconds)
                measured[name]["cpu"].append((cpu_s(process.pid) - before) / done.requests * 1e6)
                measured[name]["rate"].append(done.rate)
                measured[name]["p99"].append(done.p99_ms)
                if done.failed:
                    say(f"{name}: {done.failed} requests failed")
        say(f"\n{CONNECTIONS} connections, {len(BODY)} bytes, medians of {rounds} rounds of {seconds} s")
        results: dict[str, Any] = {}
        own = measured["reward_loop"]
        for name, values in measured.items():
            rate, p99, cpu = (statistics.median(values[what]) for what in ("rate", "p99", "cpu"))
            say(f"  {name:14} {rate:8.0f} requests/s   p99 {p99:6.2f} ms   CPU {cpu:5.1f} us a request")
            results |= {f"{name}_rps": round(rate), f"{name}_p99_ms": round(p99, 2), f"{name}_cpu_us": round(cpu, 1)}
            if values is own:
                continue
            # The median of the ratios of each round: the machine's speed varies more between rounds than within one.
            for what, prefix in (("rate", ""), ("p99", "p99_"), ("cpu", "cpu_")):
                ratios = [mine / other for mine, other in zip(own[what], values[what], strict=True)]
                low, median, high = quartiles(ratios)
                results[f"{prefix}vs_{name}"] = round(median, 2)
                results[f"{prefix}vs_{name}_quartiles"] = [round(low, 2), round(high, 2)]
            spread = results[f"vs_{name}_quartiles"]
            say(f"  {'':14} reward_loop: {results[f'vs_{name}']} times the requests (quartiles {spread}),")
            say(f"  {'':14} {results[f'cpu_vs_{name}']} of its CPU")
        return results

    def instructions(self) -> dict[str, Any]:
        """Count the router's instructions in user space, which do not depend on the load of the machine."""
        backends = [self.servers.backend(0)[0] for _ in range(2)]
        count = self.counted_by_perf(backends) or self.counted_by_callgrind(backends)
        if count is None:
            say("instructions are skipped: perf cannot count them here, and valgrind is not installed")
            return {}
        each = round(count / COUNTED_REQUESTS)
        say(f"{each:,} instructions in user space for a request (target {TARGETS['instructions_per_request'][1]:,})")
        return {"instructions_per_request": each}

    def counted_by_perf(self, backends: list[str]) -> int | None:
        perf = shutil.which("perf")
        # A virtual machine may have no counter: then the fields say so.
        event = ["-x", ",", "-e", "instructions:u"]
        if not perf or not first_field(subprocess.run([perf, "stat", *event, "true"], capture_output=True).stderr):
            return None
        url, process, _ = self.servers.start_own(backends)
        self.servers.own_load(url, CONNECTIONS, requests=COUNTED_REQUESTS)
        load = [sys.executable, "-m", LOAD, "load", url, str(CONNECTIONS), str(COUNTED_REQUESTS), "0"]
        done = subprocess.run([perf, "stat", *event, "-p", str(process.pid), "--", *load], capture_output=True)
        stop(process)
        return first_field(done.stderr)

    def counted_by_callgrind(self, backends: list[str]) -> int | None:
        if not shutil.which("valgrind") or not shutil.which("callgrind_control"):
            return None
        dump = self.servers.folder / "callgrind"
        under = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dump}"]
        # It runs about 50 times as slowly: health checks would be a larger share, and might time out.
        url, process, _ = self.servers.start_own(backends, under, health_interval_s=1000)
        self.servers.own_load(url, CONNECTIONS, requests=COUNTED_REQUESTS)
        for command in (["-i", "on"], None, ["-d"]):
            if command is None:
                self.servers.own_load(url, CONNECTIONS, requests=COUNTED_REQUESTS)
            else:
                subprocess.run(["callgrind_control", *command, str(process.pid)], check=True, capture_output=True)
        stop(process)
        found = re.search(r"^summary: (\d+)", dump.with_name("callgrind.1").read_text(), re.MULTILINE)
        return int(found[1]) if found else None

    def slow(self, args: argparse.Namespace) -> dict[str, Any]:
        say(f"\n{SLOW_REQUESTS} requests at once, on servers that take {SLOW_S:g} s")
        backends = [self.servers.backend(SLOW_S) for _ in range(4)]
        urls = [url for url, _ in backends]
        results: dict[str, Any] = {}
        times = {}
        routers: dict[str, Callable[[], Any]] = {"reward_loop": lambda: self.servers.start_own(urls)}
        for peer in PEERS if args.peers_python and not args.quick else ():
            routers[peer] = partial(self.servers.start_peer, peer, args.peers_python, urls)
        # Alternating runs, and the minimum of each: other load only adds time.
        for name in [*routers] * (1 if args.quick else 2):
            started = routers[name]()
            if started is None:
                continue
            url, process, _ = started
            done = self.servers.own_load(url, SLOW_REQUESTS, requests=SLOW_REQUESTS)
            times[name] = min(done["seconds"], times.get(name, math.inf))
            peak = peak_mb(process.pid)
            say(f"  {name:14} {done['seconds']:6.2f} s   {done['failed']} failed   {peak:.0f} MB")
            results[f"inflight_4096_{name}_s"] = round(times[name], 2)
            results[f"inflight_4096_{name}_mb"] = max(round(peak), results.get(f"inflight_4096_{name}_mb", 0))
            failed = f"inflight_4096_{name}_failed"
            results[failed] = done["failed"] + results.get(failed, 0)
            stop(process)
        for _, process in backends:
            stop(process)
        return results

    def killed(self) -> dict[str, Any]:
        backends = [self.servers.backend(0.02) for _ in range(4)]
        url, router, _ = self.servers.start_own([url for url, _ in backends])
        load = self.servers.popen_load(url, CONNECTIONS, seconds=5)
        time.sleep(1)
        lost, process = backends[0]
        process.kill()
        process.wait()
        time.sleep(1)
        backends[0] = self.servers.backend(0.02, port=int(lost.rpartition(":")[2]))
        time.sleep(1)
        before = self.servers.requests(url)
        done = json.loads(load.communicate()[0])
        after = self.servers.requests(url)
        share = (after[lost] - before[lost]) / max(1, sum(after.values()) - sum(before.values()))
        say(f"\none of four servers killed under load, then restarted: {done['requests']} requests, ")
        say(f"  {done['failed']} failed; after its restart, it receives {share:.0%} of them")
        for process in [router, *(process for _, process in backends)]:
            stop(process)
        return {"killed_worker_failed": done["failed"], "killed_worker_share": round(share, 3)}

    async def restart(self) -> dict[str, Any]:
        """Kill a router of `RewardModelManager` while calls of the library's own client are in flight."""
        # Imported here, so that backends and load generators start fast.
        from reward_loop.config import RewardModelConfig
        from reward_loop.serving import RewardModelManager

        backends = [self.servers.backend(RESTART_S) for _ in range(4)]
        config = RewardModelConfig(
            engine="external",
            urls=tuple(url for url, _ in backends),
            served_model_name="judge",
            kind="generative",
            log_dir=str(self.servers.folder / "manager"),
        )
        async with RewardModelManager(config) as models:
            address = models.reward_router_address
            command = [sys.executable, "-m", LOAD, "callers", address, str(SLOW_REQUESTS)]
            callers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            url, sent, in_flight = f"http://{address}", 0, 0
            while sent < SLOW_REQUESTS and callers.returncode is None:
                await asyncio.sleep(0.1)
                workers = await asyncio.to_thread(self.servers.workers, url)
                sent, in_flight = (sum(worker[name] for worker in workers) for name in ("requests", "in_flight"))
            os.kill(models.pids()["router"], signal.SIGKILL)
            began = time.perf_counter()
            seconds = await asyncio.to_thread(first_answer, url + "/live", began)
            output, _ = await callers.communicate()
        done = json.loads(output)
        say(f"\nrouter killed with {in_flight} calls of the library's client in flight: answers after {seconds:.2f} s,")
        say(f"  {done['failed']} calls were lost")
        for _, process in backends:
            stop(process)
        return {
            "restart_s": round(seconds, 2),
            "restart_in_flight": in_flight,
            "restart_lost": done["failed"],
            "restart_answered": done["answered"],
        }

    def memory(self, requests: int) -> dict[str, Any]:
        url, process, _ = self.servers.start_own(self.servers.instant_backends())
        self.servers.own_load(url, CONNECTIONS, requests=10_000)
        before = rss_mb(process.pid)
        done = self.servers.own_load(url, CONNECTIONS, requests=requests)
        after = rss_mb(process.pid)
        say(f"\nmemory: {before:.1f} MB after 10,000 requests, {after:.1f} MB after {requests:,} more")
        stop(process)
        return {"memory_growth_mb": round(after - before, 1), "memory_requests": requests, "failed": done["failed"]}


def first_answer(url: str, began: float) -> float:
    """Return the seconds from ``began`` until the server answers."""
    while True:
        # A connection that was accepted before the death may be reset.
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60):
            return time.perf_counter() - began


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, median, high


def first_field(output: bytes) -> int | None:
    """Return the count in a line of ``perf stat -x ,``; ``None`` if there is none."""
    found = re.search(rb"^(\d+),", output, re.MULTILINE)
    return int(found[1]) if found else None


if __name__ == "__main__":
    sys.exit(main())
