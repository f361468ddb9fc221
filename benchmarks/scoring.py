"""Measures the cost of scoring, compared with verl 0.9.1's reward worker, and whether limits hold.

    python -m benchmarks.scoring [--quick]

- Samples per second of one reward worker, for sync and async functions that do nothing. The samples are 4,096 real
  answers to GSM8K in the format of verl's agent loop, decoded by a BPE tokenizer. Our worker has limits and retries
  enabled; it is measured without records, and with records of all samples in full. Rounds of all workers alternate in
  one process, and the best of each is reported: other load only adds time. CPU time is reported too: it depends less on
  other load.
- Efficiency of worker processes for CPU-bound functions (see ``_processes.py``).
- Eight Ray actors that share one limit: the maximum number of calls in flight and the maximum number of requests
  in any window, both counted by the judge, and the utilization of the limits. The window is 60 s, with ``--quick`` 4 s.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import reward_loop
from benchmarks._processes import measure_process_efficiency
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop._util.process import freeze_and_raise_gc_threshold

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("REWARD_LOOP_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
SAMPLES = 4096
WORKERS = 8
CONCURRENT = 32
JUDGE_SECONDS = 0.4
WINDOWS = 2
LIMITS = ("calls", "rate")

NOTHING = """
def sync(data_source, solution_str, ground_truth, extra_info):
    return 1.0

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


class Speed(NamedTuple):
    """The speed of a reward worker."""

    per_s: float
    """Samples per second, until the rewards are ready."""
    cpu_us: float
    """CPU time per sample in microseconds, of all threads, until the records are written."""


def answers() -> list[tuple[str, str]]:
    """Return real solutions, each with its reference answer."""
    if not DATA.exists():
        sys.exit(
            f"no GSM8K data in {DATA}: set REWARD_LOOP_GSM8K to a folder with train.jsonl and model_solutions.jsonl"
        )
    found = []
    for line in (DATA / "model_solutions.jsonl").read_text().splitlines():
        row = json.loads(line)
        found += [(row[model]["solution"], row["ground_truth"]) for model in row if isinstance(row[model], dict)]
    for line in (DATA / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.append((row["answer"], row["answer"]))
    return found[:SAMPLES]


def save_tokenizer(texts: list[str], folder: Path) -> Any:
    """Train a byte-level BPE tokenizer with 8,192 tokens on the texts, save it to ``folder``, and return it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=8192, special_tokens=["<|end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def rollouts(tokenizer: Any, texts: list[tuple[str, str]]) -> list[Any]:
    """Return one ``DataProto`` per rollout, in the format of verl's agent loop."""
    import numpy as np
    import torch
    from verl import DataProto

    def column(value: Any) -> Any:
        array = np.empty(1, dtype=object)
        array[0] = value
        return array

    rows = []
    for i, (text, truth) in enumerate(texts):
        responses = torch.tensor([tokenizer.encode(text)])
        prompts = torch.ones(1, 64, dtype=torch.long)
        rows.append(
            DataProto.from_dict(
                tensors={
                    "prompts": prompts,
                    "responses": responses,
                    "attention_mask": torch.ones(1, 64 + responses.shape[1], dtype=torch.long),
                },
                non_tensors={
                    "data_source": column("openai/gsm8k"),
                    "reward_model": column({"ground_truth": truth}),
                    "extra_info": column({"index": i}),
                    "uid": column(str(i)),
                    "response_len": column(responses.shape[1]),
                },
            )
        )
    return rows


def configuration(folder: Path, name: str, *more: str) -> Any:
    """Return the settings of a run with limits, retries and records, and with ``more`` overrides."""
    from hydra import compose, initialize_config_dir

    from reward_loop.verl.installed import verl_config_dir
    from reward_loop.verl.options import resolve

    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        f"custom_reward_function.path={folder}/nothing.py",
        f"custom_reward_function.name={name}",
        "+reward_loop.limits.default.max_concurrent=4096",
        "+reward_loop.limits.default.requests_per_minute=100000000",
        f"+reward_loop.log_dir={folder}/records",
        *more,
    ]
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        config = compose("ppo_trainer", overrides)
    return resolve(config)


def throughput(folder: Path, rounds: int) -> dict[str, Speed]:
    """Return the speed of verl's worker and of ours, without (``bare``) and with records; the best of all rounds."""
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    from reward_loop.records import records
    from reward_loop.verl.workers.reward_worker import RewardWorker

    thresholds = gc.get_threshold()
    texts = answers()
    rows = rollouts(save_tokenizer([text for text, _ in texts], folder), texts)
    (folder / "nothing.py").write_text(NOTHING)

    async def score(compute_score: Callable[[Any], Awaitable[dict[str, Any]]], ours: bool) -> Speed:
        # The garbage-collector state of separate processes: our worker changes it at its start, verl's does not.
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        if ours:
            freeze_and_raise_gc_threshold()  # also runs a collection
        else:
            gc.collect()
        began, cpu_began = time.perf_counter(), time.process_time()
        rewards = await asyncio.gather(*(asyncio.create_task(compute_score(row)) for row in rows))
        seconds = time.perf_counter() - began
        assert all(reward["reward_score"] == 1.0 for reward in rewards)
        # Records that are still written would slow down the next worker. Their CPU time counts for this one.
        records(folder / "records").flush()
        cpu = time.process_time() - cpu_began
        return Speed(len(rows) / seconds, cpu / len(rows) * 1e6)

    async def measure() -> dict[str, Speed]:
        workers = {}
        for name in ("asynchronous", "sync"):
            settings = configuration(folder, name)
            workers[f"verl {name}"] = RewardLoopWorker(settings.config)
            workers[f"ours {name}"] = RewardWorker(settings, None)
            workers[f"bare {name}"] = RewardWorker(configuration(folder, name, "reward_loop.log_dir=null"), None)
        speeds: dict[str, list[Speed]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, worker in workers.items():
                speeds[name].append(await score(worker.compute_score, not name.startswith("verl")))
        return {
            name: Speed(max(speed.per_s for speed in found), min(speed.cpu_us for speed in found))
            for name, found in speeds.items()
        }

    return asyncio.run(measure())


class Judge:
    """A judge server that answers after `JUDGE_SECONDS`; records request times and the requests in flight."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.in_work = self.peak = 0
        self.busy = 0.0
        self._since = time.monotonic()
        self._clients: set[asyncio.StreamWriter] = set()

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self.busy += self.in_work * (now - self._since)
        self._since = now
        self.in_work += change
        self.peak = max(self.peak, self.in_work)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while await reader.readline():
                self.begun.append(time.monotonic())
                self._count(+1)
                await asyncio.sleep(JUDGE_SECONDS)
                self._count(-1)
                writer.write(b"1\n")
        self._clients.discard(writer)
        writer.close()

    def reset(self) -> None:
        self._count(0)
        self.begun.clear()
        self.peak, self.busy = self.in_work, 0.0

    def most_in_a_window(self, period: float) -> int:
        """Return the maximum number of requests in any half-open window of ``period`` seconds."""
        return max(bisect_left(self.begun, start + period) - i for i, start in enumerate(self.begun))


class Caller:
    """A worker that makes calls in a loop, with more of them pending than the limit allows. A Ray actor."""

    def __init__(self, job: Any, name: str, limits: dict[str, Any], judge: str) -> None:
        from reward_loop.verl.run.job import JobLimits

        options = RewardLoopConfig(limits=limits)
        self._judge = judge.rsplit(":", 1)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._function = ScoringFunction(self._ask, options=options, limits=JobLimits(job, name, options))
        self._calls: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        """Open connections in advance, so that connecting does not delay requests."""
        for _ in range(2 * CONCURRENT):
            self._idle.append(await asyncio.open_connection(*self._judge))

    async def start(self, limit: str) -> None:
        """Start the calls under a limit."""
        self._calls = [asyncio.create_task(self._call(limit)) for _ in range(2 * CONCURRENT)]

    async def stop(self) -> None:
        """Stop the calls, and raise the first error of one."""
        for task in self._calls:
            task.cancel()
        for ended in await asyncio.gather(*self._calls, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _ask(self, data_source: str) -> float:
        async with reward_loop.limit(data_source):
            reader, writer = self._idle.pop()
            writer.write(b"?\n")
            answer = float(await reader.readline())
            self._idle.append((reader, writer))
        return answer

    async def _call(self, limit: str) -> None:
        while True:
            result = await self._function(RewardSample("", limit))
            assert result.score == 1.0, result.error


async def keep_limits(period: float, seconds: float) -> dict[str, float]:
    """Run eight workers under one concurrency limit, then under one request limit."""
    import ray

    from reward_loop.verl.run.job import MAX_CONCURRENCY, Job

    per_window = int(period * CONCURRENT / JUDGE_SECONDS / 4)
    limits = {LIMITS[0]: {"max_concurrent": CONCURRENT}, LIMITS[1]: {"requests_per_minute": per_window}}
    judge = Judge()
    server = await asyncio.start_server(judge.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    result: dict[str, float] = {"limit": CONCURRENT, "window_limit": per_window, "window_s": period}
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    job = ray.remote(Job).options(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
    handle = job.remote(RewardLoopConfig(limits=limits), period)
    caller = ray.remote(Caller).options(num_cpus=0)
    callers = [caller.remote(handle, f"worker {number}", limits, address) for number in range(WORKERS)]

    async def all_do(method: str, *arguments: Any) -> None:
        await asyncio.gather(*(getattr(one, method).remote(*arguments) for one in callers))

    await all_do("connect")
    await all_do("start", LIMITS[0])
    await asyncio.sleep(1.0)  # until all workers make calls; then measure for a fixed time
    judge.reset()
    await asyncio.sleep(seconds)
    judge._count(0)
    result["limit_peak"] = judge.peak
    result["limit_concurrency_utilisation"] = judge.busy / seconds / CONCURRENT
    await all_do("stop")
    await all_do("connect")
    judge.reset()
    await all_do("start", LIMITS[1])
    await asyncio.sleep(WINDOWS * period + 0.5)
    result["limit_window_peak"] = judge.most_in_a_window(period)
    # Count whole periods only, from the first request.
    made = bisect_left(judge.begun, judge.begun[0] + WINDOWS * period)
    result["limit_rate_utilisation"] = made / (WINDOWS * per_window)
    ray.shutdown()
    server.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a shorter window, under 50 s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speed = throughput(Path(folder), 2 if options.quick else 8)
    print(f"{'samples a second, functions that do nothing':46}{'verl':>9}{'ours':>9}{'times':>7}{'CPU times':>11}")
    line: dict[str, Any] = {}
    for name, key in (("asynchronous", "async"), ("sync", "sync")):
        verl = speed[f"verl {name}"]
        for worker, label, suffix in (("bare", "without records", "_without_records"), ("ours", "with records", "")):
            ours = speed[f"{worker} {name}"]
            times, cpu_times = ours.per_s / verl.per_s, verl.cpu_us / ours.cpu_us
            row = f"{f'{name}, {label}':46}{verl.per_s:>9,.0f}{ours.per_s:>9,.0f}{times:>7.1f}{cpu_times:>11.1f}"
            print(row, flush=True)
            line |= {f"vs_verl_{key}{suffix}": round(times, 2), f"vs_verl_cpu_{key}{suffix}": round(cpu_times, 2)}
        line[f"samples_per_s_{key}"] = round(ours.per_s)
    processes = measure_process_efficiency(options.quick)
    print(f"{'process efficiency':46}{processes['process_efficiency']:>25.1%}", flush=True)
    limits = asyncio.run(keep_limits(*((4.0, 3.0) if options.quick else (60.0, 30.0))))
    print(
        f"{WORKERS} workers, {limits['limit']} at a time: at most {limits['limit_peak']} in flight, "
        f"{limits['limit_concurrency_utilisation']:.1%} used"
    )
    print(
        f"{WORKERS} workers, {limits['window_limit']} in {limits['window_s']:g} s: at most "
        f"{limits['limit_window_peak']} in any such window, {limits['limit_rate_utilisation']:.1%} used"
    )
    used = min(limits["limit_concurrency_utilisation"], limits["limit_rate_utilisation"])
    line |= {key: round(value, 4) for key, value in (processes | limits).items()}
    print(json.dumps(line | {"limit_utilisation": round(used, 4), "workers": WORKERS}))


if __name__ == "__main__":
    main()
