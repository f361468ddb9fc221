"""The load of the router's benchmark: its backends, its load generator and callers, each in a process of its own.

python -m benchmarks.router_load backend PORT DELAY_S
python -m benchmarks.router_load load URL CONNECTIONS REQUESTS SECONDS
python -m benchmarks.router_load callers ADDRESS CALLS
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from typing import Any

import uvloop

__all__ = ["ANSWER", "BODY", "MODELS", "PATH", "allow_many_files"]

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
MODELS = json.dumps({"object": "list", "data": [{"id": "judge", "object": "model", "owned_by": "vllm"}]})
PATH = "/v1/chat/completions"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


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
        body = (MODELS if b" /v1/models " in head else ANSWER).encode()
        answer = HEALTHY % (len(body), body)
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

    async def call() -> None:
        async with post(address, PATH, json.loads(BODY), timeout=120.0):
            pass

    answers = await asyncio.gather(*(call() for _ in range(count)), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in failed[:3]:
        print(f"  a call was lost: {error}", file=sys.stderr)
    print(json.dumps({"answered": len(answers) - len(failed), "failed": len(failed)}))


def allow_many_files() -> None:
    """Raise this process's limit on open files as far as allowed; child processes have the same limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str]) -> None:
    """Run one of the commands above."""
    allow_many_files()
    match arguments:
        case ["backend", port, delay]:
            uvloop.run(run_backend(int(port), float(delay)))
        case ["load", url, connections, requests, seconds]:
            uvloop.run(run_load(url, int(connections), int(requests), float(seconds)))
        case ["callers", address, count]:
            uvloop.run(run_callers(address, int(count)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
