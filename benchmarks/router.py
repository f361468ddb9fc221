"""Compares the router with verl's NaiveRouter, sglang-router and nginx.

    python -m benchmarks.router [--quick] [--sglang-python PATH]

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
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

CONNECTIONS = 64
SLOW_REQUESTS = 4096
SLOW_S = 2.0
RESTART_S = 10.0
"""Seconds in which the servers answer, in the test that kills the router: all calls must be in flight by then."""
BODY = json.dumps({"model": "judge", "messages": [{"role": "user", "content": "x" * 1980}]}).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "judge",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Score: 7"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 4, "total_tokens": 504},
    }
)
PATH = "/v1/chat/completions"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter rounds, without the memory test: under 50 s")
    parser.add_argument("--rounds", type=int, help="rounds of the throughput test (default: 5, quick: 4)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the memory test (%(default)s)")
    parser.add_argument("--sglang-python", metavar="PATH", help="path of a Python with sglang-router==0.3.2")
    parser.add_argument("--only", choices=("restart",), help="only the test that kills the router")
    parser.add_argument("--skip-naive", action="store_true", help="leave out verl's NaiveRouter")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder), stack)
        results = bench.run(args)
    print(json.dumps(results))


class Bench:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.wrk = shutil.which("wrk")
        self.nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        if args.only == "restart":
            return asyncio.run(self.restart())
        results: dict[str, Any] = {}
        say(f"load generator: {'wrk' if self.wrk else 'the built-in uvloop client'}")
        backends = self.instant_backends()
        routers: dict[str, Any] = {}
        starts = []
        tries = 2 if args.quick else 3
        for _ in range(tries):
            url, process, seconds = self.start_own(backends)
            starts.append(seconds)
            if len(starts) < tries:
                stop(process)
        routers["reward_loop"] = url, process
        results["ready_s"] = round(min(starts), 3)
        say(f"ready: reward-loop route in {min(starts):.2f} s (the best of {len(starts)} starts)")
        # Started in a thread, because importing verl is slow.
        naive = ThreadPoolExecutor().submit(lambda: None if args.skip_naive else self.start_naive(backends))
        if args.sglang_python and Path(args.sglang_python).exists():
            url, process, seconds = self.start_sglang(args.sglang_python, backends)
            routers["sglang_router"] = url, process
            results["ready_sglang_router_s"] = round(seconds, 3)
        else:
            say("sglang-router is skipped: --sglang-python needs the path of a Python with sglang-router==0.3.2")
        if self.nginx:
            routers["nginx"] = self.start_nginx_proxy(backends)
        else:
            say("nginx is skipped: it is not installed")
        if started := naive.result():
            routers["naive_router"] = started
        results |= self.throughput(routers, args.rounds or (4 if args.quick else 5), 1 if args.quick else 4)
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
            self.load(url, 1)
        for _ in range(rounds):
            for name, (url, _) in routers.items():
                rate, p99, failed = self.load(url, seconds)
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
        for peer in set(routers) - {"reward_loop"}:
            # The median of the ratios of each round: the machine's speed varies more between rounds than within one.
            pairs = zip(rates["reward_loop"], rates[peer], strict=True)
            results[f"vs_{peer}"] = round(statistics.median(own / other for own, other in pairs), 2)
        if "sglang_router" in routers:
            pairs = zip(p99s["reward_loop"], p99s["sglang_router"], strict=True)
            results["p99_vs_sglang_router"] = round(statistics.median(own / other for own, other in pairs), 2)
        return results

    def slow(self, args: argparse.Namespace) -> dict[str, Any]:
        say(f"\n{SLOW_REQUESTS} requests at once, on servers that take {SLOW_S:g} s")
        servers = [self.backend(SLOW_S) for _ in range(4)]
        urls = [url for url, _ in servers]
        results: dict[str, Any] = {}
        times = {}
        routers = {"reward_loop": lambda: self.start_own(urls)[:2]}
        if args.sglang_python and Path(args.sglang_python).exists():
            routers["sglang_router"] = lambda: self.start_sglang(args.sglang_python, urls)[:2]
        if not args.quick and not args.skip_naive:
            routers["naive_router"] = lambda: self.start_naive(urls)
        # Alternating runs, and the minimum of each: other load only adds time.
        turns = [*routers] if args.quick else [*routers, *("reward_loop", "sglang_router") * 2]
        for name in filter(routers.__contains__, turns):
            started = routers[name]()
            if started is None:
                continue
            url, process = started
            done = self.own_load(url, SLOW_REQUESTS, requests=SLOW_REQUESTS)
            times[name] = min(done["seconds"], times.get(name, math.inf))
            peak = peak_mb(process.pid)
            say(f"  {name:14} {done['seconds']:6.2f} s   {done['failed']} failed   {peak:.0f} MB")
            results[f"inflight_4096_{name}_s"] = round(times[name], 2)
            results[f"inflight_4096_{name}_mb"] = max(round(peak), results.get(f"inflight_4096_{name}_mb", 0))
            if name == "reward_loop":
                results["inflight_4096_failed"] = done["failed"] + results.get("inflight_4096_failed", 0)
            stop(process)
        if "sglang_router" in times:
            results["inflight_4096_vs_sglang_router"] = round(times["sglang_router"] / times["reward_loop"], 2)
        for _, process in servers:
            stop(process)
        return results

    def killed(self) -> dict[str, Any]:
        servers = [self.backend(0.02) for _ in range(4)]
        url, router, _ = self.start_own([url for url, _ in servers])
        load = self.popen_load(url, CONNECTIONS, seconds=5)
        time.sleep(1)
        lost, process = servers[0]
        process.kill()
        process.wait()
        time.sleep(1)
        servers[0] = self.backend(0.02, port=int(lost.rpartition(":")[2]))
        time.sleep(1)
        before = self.requests(url)
        done = json.loads(load.communicate()[0])
        after = self.requests(url)
        share = (after[lost] - before[lost]) / max(1, sum(after.values()) - sum(before.values()))
        say(f"\none of four servers killed under load, then restarted: {done['requests']} requests, ")
        say(f"  {done['failed']} failed; after its restart, it receives {share:.0%} of them")
        for process in [router, *(process for _, process in servers)]:
            stop(process)
        return {"killed_worker_failed": done["failed"], "killed_worker_share": round(share, 3)}

    async def restart(self) -> dict[str, Any]:
        """Kill a router of `RewardModelManager` while calls of the library's own client are in flight."""
        # Imported here, so that backends and load generators start fast.
        from reward_loop.config import RewardModelConfig
        from reward_loop.serving import RewardModelManager

        servers = [self.backend(RESTART_S) for _ in range(4)]
        config = RewardModelConfig(
            engine="external",
            urls=tuple(url for url, _ in servers),
            served_model_name="judge",
            kind="generative",
            log_dir=str(self.folder / "manager"),
        )
        async with RewardModelManager(config) as models:
            address = models.reward_router_address
            command = [sys.executable, "-m", "benchmarks.router", "_callers", address, str(SLOW_REQUESTS)]
            callers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            url, sent, in_flight = f"http://{address}", 0, 0
            while sent < SLOW_REQUESTS and callers.returncode is None:
                await asyncio.sleep(0.1)
                workers = await asyncio.to_thread(self.workers, url)
                sent, in_flight = (sum(worker[name] for worker in workers) for name in ("requests", "in_flight"))
            os.kill(models.pids()["router"], signal.SIGKILL)
            began = time.perf_counter()
            seconds = await asyncio.to_thread(first_answer, url + "/live", began)
            output, _ = await callers.communicate()
        done = json.loads(output)
        say(f"\nrouter killed with {in_flight} calls of the library's client in flight: answers after {seconds:.2f} s,")
        say(f"  {done['failed']} calls were lost")
        for _, process in servers:
            stop(process)
        return {
            "restart_s": round(seconds, 2),
            "restart_in_flight": in_flight,
            "restart_lost": done["failed"],
            "restart_answered": done["answered"],
        }

    def memory(self, requests: int) -> dict[str, Any]:
        url, process, _ = self.start_own(self.instant_backends())
        self.own_load(url, CONNECTIONS, requests=10_000)
        before = rss_mb(process.pid)
        done = self.own_load(url, CONNECTIONS, requests=requests)
        after = rss_mb(process.pid)
        say(f"\nmemory: {before:.1f} MB after 10,000 requests, {after:.1f} MB after {requests:,} more")
        stop(process)
        return {"memory_growth_mb": round(after - before, 1), "memory_requests": requests, "failed": done["failed"]}

    # Starting routers and backends

    def start_own(self, backends: list[str]) -> tuple[str, subprocess.Popen[bytes], float]:
        port = free_port()
        workers = [option for url in backends for option in ("--worker", url)]
        code = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"
        command = [sys.executable, "-c", code, "route", "--port", str(port), *workers]
        url, process, ready = self.start(command, f"http://127.0.0.1:{port}", "/ready", "reward_loop")
        # The router imports its control plane in a thread after it is ready. This request waits for that import.
        with urllib.request.urlopen(url + "/workers", timeout=60):
            return url, process, ready

    def start_sglang(self, python: str, backends: list[str]) -> tuple[str, subprocess.Popen[bytes], float]:
        port = free_port()
        command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]
        command += ["--policy", "round_robin", "--worker-urls", *backends]
        return self.start(command, f"http://127.0.0.1:{port}", PATH, "sglang_router")

    def start_naive(self, backends: list[str]) -> tuple[str, subprocess.Popen[bytes]] | None:
        port = free_port()
        code = (
            "import sys; from verl.experimental.reward_loop.router.naive_router import run_router; "
            "run_router('127.0.0.1', int(sys.argv[1]), sys.argv[2:])"
        )
        command = [sys.executable, "-c", code, str(port), *backends]
        try:
            return self.start(command, f"http://127.0.0.1:{port}", PATH, "naive_router")[:2]
        except RuntimeError as error:
            say(f"verl's NaiveRouter is skipped: {error}")
            return None

    def start_nginx_proxy(self, backends: list[str]) -> tuple[str, subprocess.Popen[bytes]]:
        port = free_port()
        servers = "".join(f"server {url.removeprefix('http://')};" for url in backends)
        http = f"""upstream pool {{ {servers} keepalive 256; }}
            server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://pool;
            proxy_http_version 1.1; proxy_set_header Connection ""; }} }}"""
        return self.start(*self.nginx_command(http, port), "nginx")[:2]

    def instant_backends(self) -> list[str]:
        if not self.nginx:
            return [self.backend(0)[0] for _ in range(4)]
        ports = [free_port() for _ in range(4)]
        listens = " ".join(f"listen 127.0.0.1:{port} backlog=4096;" for port in ports)
        http = f"""server {{ {listens} location / {{ default_type application/json; return 200 '{ANSWER}'; }} }}"""
        self.start(*self.nginx_command(http, ports[0]), "backends")
        return [f"http://127.0.0.1:{port}" for port in ports]

    def nginx_command(self, http: str, port: int) -> tuple[list[str], str, str]:
        config = self.folder / f"nginx-{port}.conf"
        config.write_text(
            f"daemon off; worker_processes 1; pid {self.folder}/nginx-{port}.pid; error_log stderr error;"
            f"events {{ worker_connections 10000; }} http {{ access_log off; keepalive_requests 100000000;"
            f"client_body_temp_path {self.folder}/body; proxy_temp_path {self.folder}/proxy; {http} }}"
        )
        assert self.nginx
        return [self.nginx, "-c", str(config)], f"http://127.0.0.1:{port}", PATH

    def backend(self, delay: float, port: int | None = None) -> tuple[str, subprocess.Popen[bytes]]:
        port = port or free_port()
        command = [sys.executable, "-m", "benchmarks.router", "_backend", str(port), str(delay)]
        url, process, _ = self.start(command, f"http://127.0.0.1:{port}", "/health", "backend")
        return url, process

    def start(self, command: list[str], url: str, path: str, name: str) -> tuple[str, subprocess.Popen[bytes], float]:
        log = self.folder / f"{name}.log"
        began = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        self.stack.callback(stop, process)
        while time.perf_counter() - began < 60:
            if process.poll() is not None:
                raise RuntimeError(f"{name} exited at its start: {log.read_text()[-500:]}")
            with contextlib.suppress(OSError):
                body = None if path in ("/ready", "/health") else BODY
                request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=10):
                    return url, process, time.perf_counter() - began
            time.sleep(0.01)
        raise RuntimeError(f"{name} was not ready within 60 s: {log.read_text()[-500:]}")

    # Load

    def load(self, url: str, seconds: int) -> tuple[float, float, int]:
        """Return requests per second, p99 latency in milliseconds, and the number of failed requests."""
        if not self.wrk:
            done = self.own_load(url, CONNECTIONS, seconds=seconds)
            return done["requests"] / done["seconds"], done["p99_ms"], done["failed"]
        script = self.folder / "post.lua"
        script.write_text(
            'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
            f"wrk.body = [==[{BODY.decode()}]==]\n"
        )
        command = [self.wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(script), url + PATH]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rate = float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])  # type: ignore[index]
        value, unit = re.search(r"^\s+99%\s+([\d.]+)(us|ms|s)$", out, re.MULTILINE).groups()  # type: ignore[union-attr]
        failed = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", out)))
        if errors := re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", out):
            failed += sum(map(int, errors.groups()))
        return rate, float(value) * {"us": 0.001, "ms": 1, "s": 1000}[unit], failed

    def own_load(self, url: str, connections: int, **until: float) -> dict[str, Any]:
        return json.loads(self.popen_load(url, connections, **until).communicate()[0])

    def popen_load(
        self, url: str, connections: int, *, requests: int = 0, seconds: float = 0
    ) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.router",
            "_load",
            url,
            str(connections),
            str(requests),
            str(seconds),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def requests(self, url: str) -> dict[str, int]:
        return {worker["url"]: worker["requests"] for worker in self.workers(url)}

    def workers(self, url: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(url + "/workers") as response:
            workers: list[dict[str, Any]] = json.load(response)
            return workers


# Load generator and backend, each in a separate process


class LoadConnection(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self.load = load
        self.data = b""
        self.sent_at = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if self.load.take():
            self.sent_at = time.perf_counter()
            self.transport.write(self.load.message)
        else:
            self.sent_at = 0.0
            self.transport.close()
            self.load.ended()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if (length and len(body) < int(length[1])) or (not length and not body.endswith(b"0\r\n\r\n")):
            return
        self.data = b""
        self.load.answered(head.split(b" ", 2)[1] == b"200", time.perf_counter() - self.sent_at)
        self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if self.sent_at:
            self.load.answered(False, time.perf_counter() - self.sent_at)
            self.load.ended()


class Load:
    def __init__(self, url: str, requests: int, seconds: float) -> None:
        host = url.removeprefix("http://")
        head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self.message = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        self.left = requests or 1 << 60
        self.until = time.perf_counter() + seconds if seconds else 1e18
        self.failed = 0
        self.latencies: list[float] = []
        self.open = 0
        self.all_ended = asyncio.Event()

    def take(self) -> bool:
        if self.left and time.perf_counter() < self.until:
            self.left -= 1
            return True
        return False

    def answered(self, well: bool, seconds: float) -> None:
        self.failed += not well
        self.latencies.append(seconds)

    def ended(self) -> None:
        self.open -= 1
        if not self.open:
            self.all_ended.set()


async def run_load(url: str, connections: int, requests: int, seconds: float) -> None:
    load = Load(url, requests, seconds)
    load.open = connections
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    began = time.perf_counter()

    async def connect() -> None:
        try:
            await loop.create_connection(lambda: LoadConnection(load), host, int(port))
        except OSError:
            load.answered(False, 0)
            load.ended()

    await asyncio.gather(*(connect() for _ in range(connections)))
    await load.all_ended.wait()
    took = time.perf_counter() - began
    load.latencies.sort()
    p99 = load.latencies[int(len(load.latencies) * 0.99)] * 1000
    print(json.dumps({"requests": len(load.latencies), "failed": load.failed, "seconds": took, "p99_ms": p99}))


class Backend(asyncio.Protocol):
    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.data = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if not end or len(body) < (int(length[1]) if length else 0):
            return
        self.data = b""
        delay = self.delay if head.startswith(b"POST") else 0
        answer = HEALTHY % (len(ANSWER), ANSWER.encode())
        if delay:
            asyncio.get_running_loop().call_later(delay, self.transport.write, answer)
        else:
            self.transport.write(answer)


async def run_backend(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Backend(delay), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


async def run_callers(address: str, count: int) -> None:
    """Send calls through the library's client, all at once, and print how many were answered."""
    from reward_loop.client.http import post

    calls = (post(address, PATH, json.loads(BODY), timeout=120.0) for _ in range(count))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in failed[:3]:
        print(f"  a call was lost: {error}", file=sys.stderr)
    print(json.dumps({"answered": len(answers) - len(failed), "failed": len(failed)}))


# Helpers


def first_answer(url: str, began: float) -> float:
    """Return the seconds from ``began`` until the server answers."""
    while True:
        # A connection that was accepted before the death may be reset.
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60):
            return time.perf_counter() - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def status_mb(pid: int, field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def rss_mb(pid: int) -> float:
    return status_mb(pid, "VmRSS")


def peak_mb(pid: int) -> float:
    return status_mb(pid, "VmHWM")


def fmt(values: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


def say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield


if __name__ == "__main__":
    with many_files():
        match sys.argv[1:]:
            case ["_backend", port, delay]:
                uvloop.run(run_backend(int(port), float(delay)))
            case ["_load", url, connections, requests, seconds]:
                uvloop.run(run_load(url, int(connections), int(requests), float(seconds)))
            case ["_callers", address, count]:
                uvloop.run(run_callers(address, int(count)))
            case _:
                main()
