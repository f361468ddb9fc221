"""Compares the router with verl's NaiveRouter, sglang-router, smg, vllm-router and nginx.

    python -m benchmarks.router [--quick] [--peers-python PATH]

All run on this machine, in short alternating rounds (A B C A B C), so that other load affects all of them equally. A
peer that is not installed is skipped, and a line names it. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.router_load import BODY, allow_many_files
from benchmarks.router_servers import CONNECTIONS, LOAD, PACKAGES, PEERS, Servers, peak_mb, rss_mb, say, stop

SLOW_REQUESTS = 4096
SLOW_S = 2.0
RESTART_S = 10.0
"""Seconds in which the servers answer, in the test that kills the router: all calls must be in flight by then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="shorter rounds, no bursts of peers, no memory test: under 50 s"
    )
    parser.add_argument("--rounds", type=int, help="rounds of the throughput test (default: 5; quick: 8 s in all)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the memory test (%(default)s)")
    parser.add_argument("--peers-python", metavar="PATH", help=f"path of a Python with {PACKAGES}")
    parser.add_argument("--only", choices=("restart",), help="only the test that kills the router")
    parser.add_argument("--skip-naive", action="store_true", help="leave out verl's NaiveRouter")
    args = parser.parse_args()
    allow_many_files()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(Servers(Path(folder), stack))
        results = bench.run(args)
    print(json.dumps(results))


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
        say(f"ready: reward-loop route in {min(starts):.2f} s (the best of {len(starts)} starts)")
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
        rounds = args.rounds or (max(1, 8 // len(routers)) if args.quick else 5)
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
        rates: dict[str, list[float]] = {name: [] for name in routers}
        p99s: dict[str, list[float]] = {name: [] for name in routers}
        for url, _ in routers.values():
            self.servers.load(url, 1)
        for _ in range(rounds):
            for name, (url, _) in routers.items():
                rate, p99, failed = self.servers.load(url, seconds)
                rates[name].append(rate)
                p99s[name].append(p99)
                if failed:
                    say(f"{name}: {failed} requests failed")
        say(f"\n{CONNECTIONS} connections, {len(BODY)} bytes, medians of {rounds} rounds of {seconds} s")
        rate = {name: statistics.median(values) for name, values in rates.items()}
        p99 = {name: statistics.median(values) for name, values in p99s.items()}
        results: dict[str, Any] = {}
        for name in routers:
            say(f"  {name:14} {rate[name]:8.0f} requests/s   p99 {p99[name]:6.2f} ms   rounds {fmt(rates[name])}")
            results[f"{name}_rps"] = round(rate[name])
            results[f"{name}_p99_ms"] = round(p99[name], 2)
        for peer in list(routers)[1:]:
            # The median of the ratios of each round: the machine's speed varies more between rounds than within one.
            pairs = zip(rates["reward_loop"], rates[peer], strict=True)
            results[f"vs_{peer}"] = round(statistics.median(own / other for own, other in pairs), 2)
            pairs = zip(p99s["reward_loop"], p99s[peer], strict=True)
            results[f"p99_vs_{peer}"] = round(statistics.median(own / other for own, other in pairs), 2)
        return results

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


def fmt(values: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


if __name__ == "__main__":
    main()
