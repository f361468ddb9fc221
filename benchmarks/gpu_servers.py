"""The part of `benchmarks.gpu` that serves two models on one GPU: answers, throughput, and a server that is killed."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import string
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from reward_loop.client import chat_complete, classify
from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager

__all__ = ["measure"]

TEXT = 400
"""Number of characters, and of tokens, of a request."""
REPLY_TOKENS = 16
KILLED_REPLY_TOKENS = 64
"""The longest reply while a server is killed: long enough that most requests are in flight."""
ROUNDS = ("router", "direct") * 2
"""Each address is measured twice, in alternation, after a round that is not counted."""

_random = random.Random(1)


def measure(report: Report, models: Path, logs: Path, cpu: bool, within_s: float) -> None:
    """Serve ``judge`` (generative) and ``scorer`` (discriminative) of a folder, and add what was measured to a report.

    Args:
        report: receives rows and figures.
        models: the folder of the models.
        logs: the folder for the logs of servers and router.
        cpu: serve with the embedded engine instead of vLLM, and send fewer requests.
        within_s: seconds that all of this may take.

    Raises:
        TimeoutError: it took longer. All servers have stopped.
        RewardLoopError: a server did not start, or a request failed.
    """
    asyncio.run(asyncio.wait_for(_measure(report, models, logs, cpu), within_s))


def _model(path: Path, memory: float, cpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"model_path": str(path), "served_model_name": path.name}
    if cpu:
        return options | {"engine": "transformers"}
    # Both servers use the same GPU: the list of devices of each contains it.
    return options | {
        "engine": "vllm",
        "env": {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]},
        "gpu_memory_utilization": memory,
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "engine_args": {"enforce_eager": True, "max_num_seqs": 256},
    }


async def _measure(report: Report, folder: Path, logs: Path, cpu: bool) -> None:
    requests, in_flight = (32, 16) if cpu else (512, 256)
    models = {"judge": _model(folder / "judge", 0.3, cpu), "scorer": _model(folder / "scorer", 0.15, cpu)}
    # One start at a time: vLLM measures the free memory of the GPU while it starts.
    config = RewardModelConfig(models=models, starts_at_a_time=1, log_dir=str(logs))
    figures: dict[str, Any] = {}
    report.figures["servers"] = figures
    before = gpu_memory(cpu)
    began = time.perf_counter()
    async with RewardModelManager(config) as manager:
        figures["ready_s"] = round(time.perf_counter() - began, 1)
        report.add("Two servers, a generative and a discriminative one", f"ready after {figures['ready_s']} s")
        router = manager.reward_router_address
        direct = await asyncio.to_thread(_addresses, router)
        await _compare_with_transformers(report, folder / "scorer", router, cpu)
        calls = {
            "judge": functools.partial(_chat, tokens=REPLY_TOKENS),
            "scorer": lambda address: classify(address, text(), model="scorer"),
        }
        for name, call in calls.items():
            figures[name] = await _throughput(
                report, name, call, {"router": router, "direct": direct[name]}, requests, in_flight
            )
        figures["killed"] = await _kill(report, manager, in_flight)
        pids = manager.pids()
        began = time.perf_counter()
    figures["stop_s"] = round(time.perf_counter() - began, 1)
    left = _running(pids)
    report.add(
        "  stopped",
        f"in {figures['stop_s']} s; left: {', '.join(left) or 'no process'}, {gpu_memory(cpu) - before} MiB of the GPU",
        ("no process left", not left),
    )


async def _compare_with_transformers(report: Report, model: Path, router: str, cpu: bool) -> None:
    sample = "hello"
    served = await classify(router, sample, model="scorer")
    expected = await asyncio.to_thread(_logit, model, sample)
    # The random head makes logits of about half the root of the hidden size; bfloat16 has three digits.
    bound = 0.01 if cpu else 0.5
    report.add(
        "  a logit, and transformers' on the CPU",
        f"{served:.3f}, {expected:.3f}",
        (f"at most {bound} apart", abs(served - expected) <= bound),
    )


def _logit(path: Path, sample: str) -> float:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # transformers reports a bias, which its class lacks; it is zero
    tokens = AutoTokenizer.from_pretrained(path)(sample)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, 0])


async def _throughput(
    report: Report,
    name: str,
    call: Callable[[str], Awaitable[Any]],
    addresses: dict[str, str],
    requests: int,
    in_flight: int,
) -> dict[str, float]:
    await _send(call, addresses["router"], requests, in_flight)
    rates: dict[str, list[float]] = {"router": [], "direct": []}
    p99: dict[str, list[float]] = {"router": [], "direct": []}
    for through in ROUNDS:
        latencies, seconds = await _send(call, addresses[through], requests, in_flight)
        rates[through].append(requests / seconds)
        p99[through].append(latencies[int(0.99 * len(latencies))])
    best = {through: max(found) for through, found in rates.items()}
    slowest = {through: min(found) for through, found in p99.items()}
    report.add(
        f"  {name}: requests/s of {requests}, {in_flight} in flight, the better of two rounds",
        f"{best['router']:.0f} through the router, {best['direct']:.0f} direct; "
        f"p99 {slowest['router']:.2f} s and {slowest['direct']:.2f} s",
    )
    return {f"{through}_per_s": round(rate, 1) for through, rate in best.items()} | {
        f"{through}_p99_s": round(seconds, 3) for through, seconds in slowest.items()
    }


async def _send(
    call: Callable[[str], Awaitable[Any]], address: str, requests: int, in_flight: int
) -> tuple[list[float], float]:
    """Make requests, and return their latencies, sorted, and the seconds until the last answer."""
    slots = asyncio.Semaphore(in_flight)

    async def one() -> float:
        async with slots:
            began = time.perf_counter()
            await call(address)
            return time.perf_counter() - began

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(requests)]
    return sorted(task.result() for task in tasks), time.perf_counter() - began


async def _kill(report: Report, manager: RewardModelManager, requests: int) -> dict[str, float]:
    """Kill the judge's server with requests in flight, and wait until it has been restarted and all are answered."""
    role = next(role for role in manager.pids() if role != "router")
    killed = manager.pids()[role]
    router = manager.reward_router_address
    calls = [asyncio.create_task(_chat(router, tokens=KILLED_REPLY_TOKENS)) for _ in range(requests)]
    try:
        waiting = 0
        while waiting < requests / 2 and not all(call.done() for call in calls):
            waiting = max(worker["in_flight"] for worker in await asyncio.to_thread(_workers, router))
        os.kill(killed, signal.SIGKILL)
        began = time.perf_counter()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        seconds = time.perf_counter() - began
    finally:
        for call in calls:
            call.cancel()
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    report.add(
        f"  {role} is killed with {waiting} requests in flight",
        f"all have ended {seconds:.1f} s later, {len(failed)} failed{f': {failed[0]}' if failed else ''}",
        ("none failed, and it was restarted", not failed and waiting > 0 and manager.pids()[role] != killed),
    )
    return {"in_flight": waiting, "failed": len(failed), "answered_after_s": round(seconds, 1)}


def _running(pids: dict[str, int]) -> list[str]:
    return [role for role, pid in pids.items() if Path(f"/proc/{pid}").exists()]


def _workers(router: str) -> list[dict[str, Any]]:
    """Return the servers behind a router."""
    with urllib.request.urlopen(f"http://{router}/workers", timeout=30) as answer:
        workers: list[dict[str, Any]] = json.load(answer)
    return workers


def _addresses(router: str) -> dict[str, str]:
    """Return the address of each model's server."""
    return {model: worker["url"].removeprefix("http://") for worker in _workers(router) for model in worker["models"]}


def _chat(address: str, *, tokens: int) -> Awaitable[Any]:
    return chat_complete(address, text(), model="judge", max_tokens=tokens, temperature=0.0)


def text() -> str:
    """Return a text that no earlier request had: a server has nothing of it in its cache."""
    return "".join(_random.choices(string.ascii_lowercase + " ", k=TEXT))


def gpu_memory(cpu: bool) -> int:
    """Return the used memory of the GPU in MiB; 0 on the CPU."""
    if cpu:
        return 0
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout)
