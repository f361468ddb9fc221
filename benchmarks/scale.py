"""Measures what a sample costs each part of the library, and how that cost grows with the samples in flight.

    python -m benchmarks.scale [--quick]

- The path of a sample: an agent loop worker (this process) calls a reward worker through Ray, with responses of 1,000,
  2,000 and 4,000 tokens; the reward function asks a judge through the router, under a limit. The figures
  are the CPU time of each process per sample, from one run without and one run with the request to the judge.
- Memory: what a sample in flight takes in the caller and in the reward worker.
- Records: CPU time and bytes of a record with a judge's prompt.
- The trainer: `RewardAgent`, with a stub that submits at the rate of 64 nodes, for growing numbers of samples in
  flight; and a poll of TransferQueue's tags.

CPU time per sample depends less on other load than a rate does, but it also grows beside other load. The last line of
the output is JSON. It needs the GSM8K data (``REWARD_LOOP_GSM8K``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import _scale_trainer
from benchmarks.router_servers import Servers, rss_mb
from benchmarks.scoring import answers, configuration, save_tokenizer
from reward_loop.records import ActiveSample, records
from reward_loop.types import Outcome, RewardResult, RewardSample

TOKENS = (1000, 2000, 4000)
PROMPT_TOKENS = 500
AT_ONCE = 256
HOLD_S = 4.0

FUNCTION = """
import asyncio

from reward_loop.client import chat_complete


async def compute_score(solution_str, extra_info, reward_router_address):
    if extra_info["asks"]:
        reply = await chat_complete(reward_router_address, solution_str, model="judge")
        return float(reply.text.removeprefix("Score: "))
    await asyncio.sleep(extra_info["hold_s"])
    return 1.0
"""


def rollout(ids: list[int], **extra_info: Any) -> Any:
    """Return a rollout as verl's agent loop passes it to a reward worker, with all its columns."""
    import numpy as np
    import torch
    from verl import DataProto

    prompts, responses = torch.ones(1, PROMPT_TOKENS, dtype=torch.long), torch.tensor([ids])
    both = torch.cat([prompts, responses], dim=1)
    values = {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"index": 0, "asks": False, "hold_s": 0.0, **extra_info},
        "uid": "7d6a3f0c-5b7e-4d29-9a44-0c1f2e3d4b5a",
        "raw_prompt": [{"role": "user", "content": "x" * 4 * PROMPT_TOKENS}],
        "prompt_len": PROMPT_TOKENS,
        "response_len": len(ids),
    }
    columns = {}
    for name, value in values.items():
        columns[name] = np.empty(1, dtype=object)
        columns[name][0] = value
    tensors = {"prompts": prompts, "responses": responses, "input_ids": both}
    tensors |= {"attention_mask": torch.ones_like(both), "position_ids": torch.arange(both.shape[1])[None]}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


async def score(client: Any, rows: list[Any], at_once: int = AT_ONCE) -> None:
    """Score rows through the client of the reward workers, as verl's agent loop does, ``at_once`` at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one(row: Any) -> None:
        async with turns:
            reward = await client.compute_score.remote(row)
        assert reward["reward_extra_info"]["reward_outcome"] == "scored", reward

    await asyncio.gather(*(one(row) for row in rows))


class Processes:
    """The processes on the path of a sample, by name; they are added while the path is built."""

    def __init__(self) -> None:
        self.named: dict[str, list[psutil.Process]] = {"caller": [psutil.Process()]}

    def add(self, name: str, *pids: int) -> None:
        self.named[name] = [psutil.Process(pid) for pid in pids]

    def find(self, name: str, part: str) -> None:
        """Add the children, and their children, whose command line contains ``part``."""
        found = [child for child in psutil.Process().children(recursive=True) if part in " ".join(child.cmdline())]
        assert found, part
        self.named[name] = found

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each name since its processes started, all threads included."""
        return {name: sum(sum(one.cpu_times()[:2]) for one in some) for name, some in self.named.items()}

    def memory_mb(self, name: str) -> float:
        return sum(rss_mb(one.pid) for one in self.named[name])


def path_of_a_sample(texts: list[str], folder: Path, quick: bool) -> dict[str, Any]:
    """Measure each process on the path of a sample, and the memory of samples in flight. Needs Ray."""
    from reward_loop.verl.run.job import RunningJob
    from reward_loop.verl.workers.reward_workers import RewardWorkers

    tokenizer = save_tokenizer(texts, folder)
    (folder / "nothing.py").write_text(FUNCTION)
    all_ids: list[int] = tokenizer.encode("".join(texts))
    count = 400 if quick else 4000
    with contextlib.ExitStack() as stack:
        processes = Processes()
        servers = Servers(folder, stack)
        url, router, _ = servers.start_own(servers.instant_backends())
        processes.add("router", router.pid)
        limit = "reward_loop.limits.default.max_concurrent=100000"
        settings = configuration(folder, "compute_score", "reward.num_workers=1", limit)
        job = RunningJob(settings.options, 60.0)
        stack.callback(job.close)
        processes.find("Ray's services", "/raylet/raylet")
        workers = RewardWorkers(settings, url.removeprefix("http://"), job)
        workers.wait_until_ready()
        processes.find("job", "ray::Job")
        processes.find("reward worker", "ray::RewardWorker")
        result: dict[str, Any] = {"cpu_us": {}, "samples_per_s": {}}
        names = list(processes.named)
        print(f"{'CPU time per sample, in us':28}" + "".join(f"{of:>16}" for of in names) + f"{'samples/s':>12}")
        for tokens in TOKENS[::2] if quick else TOKENS:
            firsts = range(0, 50 * 97, 97)
            for asks in (False, True):
                rows = [rollout(all_ids[i : i + tokens], asks=asks) for i in firsts]
                asyncio.run(score(workers.client, rows * (2 if quick else 6)))  # opens connections, and fills caches
                before, began = processes.cpu_s(), time.perf_counter()
                asyncio.run(score(workers.client, rows * (count // len(rows))))
                seconds, after = time.perf_counter() - began, processes.cpu_s()
                name = f"{tokens} {'judge' if asks else 'no request'}"
                result["cpu_us"][name] = {of: round(1e6 * (after[of] - before[of]) / count, 1) for of in after}
                result["samples_per_s"][name] = round(count / seconds)
                figures = "".join(f"{result['cpu_us'][name][of]:>16,.0f}" for of in names)
                print(f"{name:28}{figures}{count / seconds:>12,.0f}", flush=True)
        rows = [rollout(all_ids[i : i + TOKENS[1]], hold_s=HOLD_S) for i in range(50)]
        before_mb = {of: processes.memory_mb(of) for of in ("caller", "reward worker")}
        result["kb_in_flight"] = asyncio.run(held(workers.client, rows * (count // len(rows)), processes, before_mb))
    return result


async def held(client: Any, rows: list[Any], processes: Processes, before_mb: dict[str, float]) -> dict[str, float]:
    """Return the memory that a sample in flight takes, in KB, while all rows wait in the reward function."""
    scoring = asyncio.create_task(score(client, rows, len(rows)))
    most = dict(before_mb)
    while not scoring.done():
        most = {of: max(mb, processes.memory_mb(of)) for of, mb in most.items()}
        await asyncio.sleep(0.1)
    await scoring
    return {of: round(1024 * (mb - before_mb[of]) / len(rows), 1) for of, mb in most.items()}


def writing_records(folder: Path, count: int) -> dict[str, float]:
    """Return CPU time and bytes of a record with a judge's prompt and reply, for a response of 2,000 tokens."""
    writer = records(folder / "written")
    response = "48 + 24 = 72. " * 600
    sample = RewardSample(response, "openai/gsm8k", "72", uid="7d6a3f0c-5b7e-4d29-9a44-0c1f2e3d4b5a")
    result = RewardResult(outcome=Outcome.SCORED, score=7.0, reward=7.0)
    messages = [{"role": "user", "content": "Is the answer correct?\n\n" + response}]
    exchange = {"id": "0a1b2c3d", "model": "judge", "messages": messages, "seconds": 1.5, "reply": "Score: 7"}
    began = time.process_time()
    for _ in range(count):
        active = ActiveSample(sample, "compute_score", is_recorded=True)
        active.exchange(exchange)
        writer.write_sample(active, result)
    writer.flush(60.0)
    seconds = time.process_time() - began
    size = sum(path.stat().st_size for path in (folder / "written").rglob("*.jsonl"))
    return {"cpu_us": round(1e6 * seconds / count, 1), "bytes": round(size / count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer calls, and at most 5,000 samples in flight: a minute"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray sets it for actors; torch reads it when it is imported
    import ray

    quick = options.quick
    texts = [text for text, _ in answers()[:500]]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=500 * 2**20, log_to_driver=False)
        stack.callback(ray.shutdown)
        result |= path_of_a_sample(texts, Path(folder), quick)
        for of, kilobytes in result["kb_in_flight"].items():
            print(f"{'memory in flight, ' + of:46}{kilobytes:>11} KB per sample")
        result["records"] = writing_records(Path(folder), 5000)
        print(f"{'record':46}{result['records']['cpu_us']:>11} us{result['records']['bytes']:>9} bytes", flush=True)
        result |= _scale_trainer.measure(quick)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
