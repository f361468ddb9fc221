"""The processes of the router's benchmark: our router, its peers, the backends and the load generators."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.router_load import ANSWER, BODY, MODELS, PATH

__all__ = ["CONNECTIONS", "LOAD", "PACKAGES", "PEERS", "Round", "Servers", "cpu_s", "peak_mb", "rss_mb", "say", "stop"]

CONNECTIONS = 64
LOAD = "benchmarks.router_load"
"""The module of backends, load generator and callers."""
PEERS = ("sglang_router", "vllm_router", "smg")
"""The modules of routers that are installed in an environment of their own."""
PACKAGES = "sglang-router==0.3.2 vllm-router==0.1.17 smg==1.13.0"
"""What to install there. `smg` is the successor of sglang-router."""


class Round(NamedTuple):
    """The requests of one round."""

    requests: int
    rate: float
    """Requests per second."""
    p99_ms: float
    failed: int


class Servers:
    """Starts routers and backends, and sends requests to them.

    Args:
        folder: the folder of logs and configuration files.
        stack: stops all processes when it is closed.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.wrk = shutil.which("wrk")
        self.nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

    def start_own(
        self, backends: list[str], under: Sequence[str] = (), **options: Any
    ) -> tuple[str, subprocess.Popen[bytes], float]:
        """Start our router, under another program if one is given; return its URL, its process and its start time."""
        port = free_port()
        command = [*under, sys.executable, "-m", "reward_loop.router.app", "--port", str(port)]
        command += ["--options", json.dumps(options)]
        command += [part for url in backends for part in ("--worker", json.dumps({"url": url}))]
        return self.start(command, f"http://127.0.0.1:{port}", "/ready", "reward_loop")

    def start_peer(
        self, module: str, python: str, backends: list[str], policy: str = "round_robin"
    ) -> tuple[str, subprocess.Popen[bytes], float] | None:
        """Start one of `PEERS`; return ``None``, and print why, if it does not start."""
        port = free_port()
        command = [python, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]
        command += ["--policy", policy, "--worker-urls", *backends]
        return self.start_if_possible(command, f"http://127.0.0.1:{port}", module)

    def start_naive(self, backends: list[str]) -> tuple[str, subprocess.Popen[bytes], float] | None:
        port = free_port()
        code = (
            "import sys; from verl.experimental.reward_loop.router.naive_router import run_router; "
            "run_router('127.0.0.1', int(sys.argv[1]), sys.argv[2:])"
        )
        command = [sys.executable, "-c", code, str(port), *backends]
        return self.start_if_possible(command, f"http://127.0.0.1:{port}", "naive_router")

    def start_if_possible(
        self, command: list[str], url: str, name: str
    ) -> tuple[str, subprocess.Popen[bytes], float] | None:
        try:
            return self.start(command, url, PATH, name)
        except (OSError, RuntimeError) as error:
            say(f"{name} is skipped: {error}")
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
        http = f"""server {{ {listens} default_type application/json;
            location / {{ return 200 '{ANSWER}'; }} location = /v1/models {{ return 200 '{MODELS}'; }} }}"""
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
        command = [sys.executable, "-m", LOAD, "backend", str(port), str(delay)]
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

    def load(self, url: str, seconds: int) -> Round:
        """Send requests on `CONNECTIONS` connections for some seconds."""
        if not self.wrk:
            done = self.own_load(url, CONNECTIONS, seconds=seconds)
            return Round(done["requests"], done["requests"] / done["seconds"], done["p99_ms"], done["failed"])
        script = self.folder / "post.lua"
        script.write_text(
            'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
            f"wrk.body = [==[{BODY.decode()}]==]\n"
        )
        command = [self.wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(script), url + PATH]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        requests = int(re.search(r"(\d+) requests in", out)[1])  # type: ignore[index]
        rate = float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1])  # type: ignore[index]
        value, unit = re.search(r"^\s+99%\s+([\d.]+)(us|ms|s)$", out, re.MULTILINE).groups()  # type: ignore[union-attr]
        failed = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", out)))
        if errors := re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", out):
            failed += sum(map(int, errors.groups()))
        return Round(requests, rate, float(value) * {"us": 0.001, "ms": 1, "s": 1000}[unit], failed)

    def own_load(self, url: str, connections: int, **until: float) -> dict[str, Any]:
        return json.loads(self.popen_load(url, connections, **until).communicate()[0])

    def popen_load(
        self, url: str, connections: int, *, requests: int = 0, seconds: float = 0
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", LOAD, "load", url, str(connections), str(requests), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def requests(self, url: str) -> dict[str, int]:
        return {worker["url"]: worker["requests"] for worker in self.workers(url)}

    def workers(self, url: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(url + "/workers") as response:
            workers: list[dict[str, Any]] = json.load(response)
            return workers


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


def cpu_s(pid: int) -> float:
    """Return the processor seconds, of user and kernel, that a process and its children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(int(child)) for child in children)


def say(line: str) -> None:
    print(line, flush=True)
