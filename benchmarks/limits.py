"""Measures the limiter service of a job: permits per second, and the latency of a permit.

    python -m benchmarks.limits [--quick]

64 clients in 4 processes, each with its own connection, request permits from one service and release them at once. The
limit is never reached.

- Permits per second: each client keeps 16 requests in flight. The CPU time of the service per permit is reported too.
- Latency of a permit: all clients together send requests at a fixed rate, a fifth of the throughput. The latency is the
  time from the request to the permit, including the round trip.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

from reward_loop import RewardLoopConfig
from reward_loop.limits.client import RemoteLimits
from reward_loop.limits.server import serve_limits

CLIENTS = 64
PROCESSES = 4
IN_FLIGHT = 16
SHARE = 0.2


async def saturate(client: RemoteLimits, seconds: float, in_flight: int) -> int:
    """Keep ``in_flight`` requests for permits in flight for ``seconds``, and return the number of permits."""
    until, permits = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal permits
        while time.perf_counter() < until:
            (await client.acquire("judge")).leave()
            permits += 1

    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return permits


async def pace(client: RemoteLimits, seconds: float, rate: float, phase: float) -> list[float]:
    """Request permits at a fixed rate, independent of earlier responses; returns the latencies in seconds."""
    began = time.perf_counter()
    took: list[float] = []

    async def ask(at: float) -> None:
        (await client.acquire("judge")).leave()
        took.append(time.perf_counter() - at)

    calls = []
    for number in range(int(seconds * rate)):
        at = began + (number + phase) / rate
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        calls.append(asyncio.create_task(ask(time.perf_counter())))
    await asyncio.gather(*calls)
    return took


async def work(address: str) -> None:
    """Run a client process.

    A line of stdin starts a measurement: its kind (``saturate`` or ``pace``), seconds, and for each client the number
    of requests in flight, or the rate.
    """
    clients = [RemoteLimits(address) for _ in range(CLIENTS // PROCESSES)]
    await asyncio.gather(*(client.status() for client in clients))
    print("ready", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        seconds, amount = float(line[1]), float(line[2])
        if line[0] == "saturate":
            print(
                sum(await asyncio.gather(*(saturate(client, seconds, int(amount)) for client in clients))), flush=True
            )
            continue
        phases = ((client, number / len(clients)) for number, client in enumerate(clients))
        took = await asyncio.gather(*(pace(client, seconds, amount, phase) for client, phase in phases))
        print(json.dumps([seconds for one in took for seconds in one]), flush=True)


def measure(seconds: float, *, in_flight: int = IN_FLIGHT, max_concurrent: int = 1_000_000) -> dict[str, float]:
    """Run the service and the clients, and return the figures.

    Args:
        seconds: the length of each measurement.
        in_flight: the number of requests that each client keeps in flight while permits per second are measured.
        max_concurrent: the limit. Requests beyond it wait.
    """
    options = RewardLoopConfig.model_validate({"limits": {"judge": {"max_concurrent": max_concurrent}}})
    with serve_limits(options) as address:
        command = [sys.executable, "-m", "benchmarks.limits", "--work", address]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        try:
            answers(processes)
            began = time.process_time()
            permits = sum(int(answer) for answer in answers(processes, f"saturate {seconds} {in_flight}")) / seconds
            cpu_s = time.process_time() - began
            rate = permits * SHARE / CLIENTS
            lists = [json.loads(answer) for answer in answers(processes, f"pace {seconds} {rate}")]
            took = sorted(seconds for one in lists for seconds in one)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return {
        "clients": CLIENTS,
        "permits_per_s": round(permits),
        "cpu_us": round(1e6 * cpu_s / seconds / permits, 1),
        "asked_per_s": round(rate * CLIENTS),
        "p50_ms": round(1000 * took[len(took) // 2], 2),
        "p99_ms": round(1000 * took[int(len(took) * 0.99)], 2),
    }


def answers(processes: list[subprocess.Popen[str]], question: str | None = None) -> list[str]:
    """Send a line to all processes if given, and return the next output line of each."""
    for process in processes:
        assert process.stdin is not None
        if question is not None:
            process.stdin.write(f"{question}\n")
            process.stdin.flush()
    found = []
    for process in processes:
        assert process.stdout is not None
        found.append(process.stdout.readline())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter measurements, under 50 s")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options.work))
        return
    result = measure(5.0 if options.quick else 20.0)
    print(f"{'limiter service, ' + str(CLIENTS) + ' clients':46}{'permits/s':>11}{'p50 ms':>9}{'p99 ms':>9}")
    print(f"{'as fast as possible':46}{result['permits_per_s']:>11,}")
    print(f"{'at a fifth of that':46}{result['asked_per_s']:>11,}{result['p50_ms']:>9}{result['p99_ms']:>9}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
