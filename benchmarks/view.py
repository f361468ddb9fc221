"""Measures `reward-loop view` on a folder of a million records, through HTTP.

    python -m benchmarks.view [--quick] [--rows N]

The folder has 1,000,000 rows of about 1 KB (60,000 with ``--quick``) in eight files, each with one exchange with a
judge. A tenth has texts: a response of 8 KB, and the request and the reply of the exchange. A row comes from the
library's own writer; the others are copies with other values. Steps have 5,120 samples in groups of 8.

- `index_s`: the first start, until the address is printed. `ready_s`: the next start, until `/api/run` is answered.
  `index_cpu_s` and `ready_cpu_s` are the processor times of the server until then.
- `page_ms_p95`: the requests of the first page, `/api/run` and `/api/steps`, and then the first 100 samples of a step,
  together.
- `sample_ms_p95`: one sample. `filter_ms_p95`: the first 100 samples of a step, filtered by reward and sorted by a
  component, a field or the reward. `search_ms_p95`: the same with a text to search for.
- `report_s`: the seconds of `reward-loop report` on the same folder, with the index that the viewer has built.
- `follow_lag_s`: another process writes 2,000 records a second through the library's writer, in real time. The age of
  the oldest record that is not shown yet, just before an update: the largest of all updates.
- `console_errors`: the errors in the console of a headless Chromium that opens the pages; null without Chromium and
  Playwright, and then `note` has the reason.
- `rss_mb`: the largest resident memory of the server, from its first start to its end.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import orjson

from reward_loop.config import RecordConfig, RewardLoopConfig
from reward_loop.records import ActiveSample, records
from reward_loop.types import Outcome, RewardResult, RewardSample

FILES = 8
STEP, GROUP = 5120, 8
TEXT_SHARE = 10
RATE = 2000
SEGMENT = 8 * 2**20
MAIN = "import sys; from reward_loop.cli import main; sys.argv[0] = 'reward-loop'; main()"


def example(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a row, its texts and its exchange, as the library writes them."""
    writer = records(folder)
    write_one(writer, 0, RewardLoopConfig())
    assert writer.flush(60.0)
    row, text, exchange = (
        orjson.loads(next(folder.glob(pattern)).read_bytes()) for pattern in ("*.jsonl", "texts/*", "exchanges/*")
    )
    return row, text, exchange


def write_one(writer: Any, number: int, options: RewardLoopConfig) -> None:
    """Write the record of one sample, with a judge's request and reply."""
    response = "First, 48 / 2 = 24 clips were sold in May. Then 48 + 24 = 72.\n" * 130
    sample = RewardSample(
        response,
        "openai/gsm8k",
        "72",
        uid=f"7d6a3f0c-5b7e-4d29-9a44-{number:012}",
        group=f"7d6a3f0c-5b7e-4d29-9a44-{number // GROUP:012}",
        step=number // STEP,
        response_length=1200,
        prompt=[{"role": "user", "content": "How many clips did Natalia sell altogether?"}],
    )
    components = {"acc": float(number % 2), "format": 1.0, "judge": 7.0}
    result = RewardResult(outcome=Outcome.SCORED, score=7.0, reward=7.0, extra_info=components)
    active = ActiveSample(sample, "compute_score (reward.py)", is_recorded=True)
    messages = [{"role": "user", "content": "Is the answer correct?\n\n" + response}]
    exchange = {
        "id": f"{number:08x}",
        "time": time.time(),
        "url": "http://127.0.0.1:8080/v1/chat/completions",
        "model": "Qwen/Qwen3-32B",
        "api_key_env": None,
        "attempt": 1,
        "messages": messages,
        "status": 200,
        "backend": "http://10.0.0.7:8001",
        "reply": "The answer is right.\nScore: 7",
        "finish_reason": "stop",
        "seconds": 1.5,
        "prompt_tokens": 2600,
        "completion_tokens": 12,
        "verdict": 7.0,
        "score": 7.0,
        "unscored": None,
    }
    active.exchange(exchange)
    writer.write_sample(active, result, options.record.full)


class Segments:
    """Texts in segments, as the writer makes them."""

    def __init__(self, folder: Path, kind: str, stem: str) -> None:
        self._folder, self._kind, self._stem = folder / kind, kind, stem
        self._folder.mkdir(exist_ok=True)
        self._number, self._lines, self._size = 0, list[bytes](), 0

    def add(self, line: bytes) -> tuple[str, int, int]:
        if self._size > SEGMENT:
            self.close()
            self._number, self._lines, self._size = self._number + 1, [], 0
        place = f"{self._kind}/{self._stem}.{self._number:06}.jsonl", self._size, len(line)
        self._lines.append(line)
        self._size += len(line)
        return place

    def close(self) -> None:
        (self._folder / f"{self._stem}.{self._number:06}.jsonl").write_bytes(b"".join(self._lines))


def make_folder(folder: Path, count: int) -> None:
    """Write the records of `count` samples."""
    with tempfile.TemporaryDirectory() as scratch:
        row, text, exchange = example(Path(scratch))
    folder.mkdir()
    numbers = random.Random(1)
    began = time.time() - count / RATE
    for file in range(FILES):
        stem = f"node{file}-{1000 + file}-{numbers.getrandbits(32):08x}"
        texts, exchanges = (Segments(folder, kind, stem) for kind in ("texts", "exchanges"))
        with (folder / f"{stem}.jsonl").open("wb") as rows:
            for i in range(file, count, FILES):
                # All samples of a group are in one file.
                number = (i // FILES // GROUP * FILES + file) * GROUP + i // FILES % GROUP
                name, uid = f"{stem}-{i // FILES}", f"{numbers.getrandbits(128):032x}_0"
                reward, seconds = numbers.random(), numbers.expovariate(0.5)
                call = {**row["judges"][0], "id": f"{i:08x}", "seconds": seconds, "score": reward * 10}
                places: dict[str, Any] = {}
                if number // GROUP % TEXT_SHARE == 0:
                    word = f"word{number // GROUP % 977}"
                    found = {**text, "id": name, "uid": uid, "response": f"{word} {text['response']}"}
                    place = texts.add(orjson.dumps(found) + b"\n")
                    places |= zip(("text_file", "text_offset", "text_bytes"), place, strict=True)
                    place = exchanges.add(orjson.dumps({**exchange, **call, "sample": name, "uid": uid}) + b"\n")
                    places |= zip(("exchange_file", "exchange_offset", "exchange_bytes"), place, strict=True)
                else:
                    empty = ("text_file", "text_offset", "text_bytes")
                    places |= dict.fromkeys((*empty, *(of.replace("text", "exchange") for of in empty)))
                one = {
                    **row,
                    "id": name,
                    "uid": uid,
                    "group": f"{number // GROUP:032x}",
                    "step": number // STEP,
                    "time": began + number / RATE,
                    "reward": reward,
                    "score": reward,
                    "components": {"acc": float(reward > 0.5), "format": numbers.random(), "judge": 7.0},
                    "response_length": numbers.randrange(50, 4000),
                    "total_s": seconds + 0.1,
                    "judges": [call],
                    **places,
                }
                rows.write(orjson.dumps(one) + b"\n")
        texts.close()
        exchanges.close()


PAGES = {
    "run": ".chart canvas",
    "samples": ".tabulator-row",
    "step/{step}": ".groups .tabulator-row",
    "step/{step}?sort=reward&order=desc": ".tabulator-row",
    "sample/{sample}": ".exchange .reply",
    "judges": ".judge canvas",
    "timeline": "h2",
}
"""The views of the page, each with an element that is there when its data are shown."""


class Viewer:
    """A running `reward-loop view`.

    Args:
        folder: the records folder.
        cache: the directory of the index.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "view", str(folder), "--port", "0"],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.started_s = time.perf_counter() - began
        if " at http" not in line:
            raise SystemExit(f"error: the viewer did not start: {line}")
        self.client = httpx.Client(base_url=line.split()[-1], timeout=60.0)

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)

    def get(self, path: str, **query: Any) -> Any:
        """Return the answer to a request."""
        answer = self.client.get(f"/api/{path}?{urlencode(query)}")
        answer.raise_for_status()
        return answer.json()

    def cpu_s(self) -> float:
        """Return the processor time of the server so far, in seconds."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return round((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 2)

    def rss_mb(self) -> float:
        """Return the largest resident memory so far, in MB."""
        with open(f"/proc/{self.process.pid}/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6

    def samples(self) -> Iterator[int]:
        """Yield the number of samples after each change, as the server reports it."""
        with self.client.stream("GET", "/api/changes", timeout=None) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield int(json.loads(line.removeprefix("data: "))["samples"])


def p95_ms(call: Callable[[], Any], times: int) -> float:
    """Return the 95th percentile of the time of a call, in ms, after one call that does not count."""
    call()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - began))
    return round(sorted(taken)[int(0.95 * times)], 1)


def measure_requests(viewer: Viewer, count: int, times: int) -> dict[str, float]:
    """Return the times of requests for samples that differ from request to request."""
    numbers, steps = random.Random(2), range(max(1, count // STEP))

    def page() -> None:
        viewer.get("run")
        viewer.get("steps")
        viewer.get("samples", step=numbers.choice(steps), limit=100)

    def names() -> list[str]:
        rows = viewer.get("samples", step=numbers.choice(steps), limit=10_000)["rows"]
        return [row["id"] for row in rows]

    known = [name for _ in range(5) for name in names()]

    def filtered(**more: Any) -> None:
        low, sort = round(numbers.random() / 2, 3), numbers.choice(["components.format", "response_length", "reward"])
        query = {"step": numbers.choice(steps), "min_reward": low, "sort": sort, "order": "desc", "limit": 100}
        assert viewer.get("samples", **query, **more)["total"] > 0 or more

    return {
        "page_ms_p95": p95_ms(page, times),
        "sample_ms_p95": p95_ms(lambda: viewer.get(f"sample/{numbers.choice(known)}"), times),
        "filter_ms_p95": p95_ms(filtered, times),
        "search_ms_p95": p95_ms(lambda: filtered(text=f"WORD{numbers.randrange(977)}"), times),
    }


def console_errors(viewer: Viewer, count: int) -> dict[str, Any]:
    """Return the number of errors in the console of a browser that opens each page, and prints them."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return {"console_errors": None, "note": "console_errors: Playwright is not installed"}
    from tools.browser import CHROMIUM, browser

    if CHROMIUM is None:
        return {"console_errors": None, "note": "console_errors: Chromium was not found"}
    step = max(1, count // STEP) - 1
    (row,) = viewer.get("samples", step=step, limit=1, text="word")["rows"]  # with texts
    errors: list[str] = []
    with browser() as chromium:
        page = chromium.new_page(base_url=str(viewer.client.base_url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        for view, shown in PAGES.items():
            page.goto("/#/" + view.format(step=step, sample=row["id"]))
            page.wait_for_selector(shown, timeout=60_000)
        page.close()
    for error in errors:
        print(f"console error: {error}", file=sys.stderr)
    return {"console_errors": len(errors)}


def write_at_rate(folder: Path, first: int, seconds: float, written: Synchronized[int]) -> None:
    """Write `RATE` records a second; a process of its own."""
    writer, options = records(folder), RewardLoopConfig(record=RecordConfig(full=1 / TEXT_SHARE))
    began = time.perf_counter()
    for number in range(int(RATE * seconds)):
        if number % 20 == 0:
            time.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        write_one(writer, first + number, options)
        written.value = number + 1
    assert writer.flush(60.0)


def measure_following(viewer: Viewer, folder: Path, count: int, seconds: float) -> dict[str, float]:
    """Return how far the viewer is behind while a process writes, and how much processor time it takes."""
    context = get_context("spawn")
    written = context.Value("q", 0)
    writer = context.Process(target=write_at_rate, args=(folder, count, seconds, written))
    shown, worst, total = 0, 0, int(RATE * seconds)
    done = threading.Event()

    def follow() -> None:
        nonlocal shown, worst
        for samples in viewer.samples():
            worst = max(worst, written.value - shown)
            shown = samples - count
            if shown >= total:
                done.set()
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    writer.start()
    writer.join()
    with contextlib.suppress(TimeoutError):
        done.wait(60.0)
    assert shown == total, f"{total - shown} of {total} records are not shown"
    return {"follow_lag_s": round(worst / RATE, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60,000 rows, and fewer requests")
    parser.add_argument("--rows", type=int, help="the number of rows")
    options = parser.parse_args()
    count = options.rows or (60_000 if options.quick else 1_000_000)
    times, seconds = (40, 5.0) if options.quick else (200, 20.0)
    result: dict[str, Any] = {"rows": count}
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch) / "rewards", Path(scratch) / "cache"
        make_folder(folder, count)
        result["rows_mb"] = round(sum(path.stat().st_size for path in folder.glob("*.jsonl")) / 1e6)
        with Viewer(folder, cache) as viewer:
            result["index_s"] = round(viewer.started_s, 2)
            result["index_cpu_s"] = viewer.cpu_s()
            result["rss_mb"] = viewer.rss_mb()
        result["index_mb"] = round(sum(path.stat().st_size for path in cache.rglob("*.duckdb")) / 1e6)
        began = time.perf_counter()
        with Viewer(folder, cache) as viewer:
            viewer.get("run")
            result["ready_s"] = round(time.perf_counter() - began, 2)
            result["ready_cpu_s"] = viewer.cpu_s()
            result |= measure_requests(viewer, count, times)
            result |= console_errors(viewer, count)
            result |= measure_following(viewer, folder, count, seconds)
            result["rss_mb"] = round(max(result["rss_mb"], viewer.rss_mb()))
        began = time.perf_counter()
        report = [sys.executable, "-c", MAIN, "report", str(folder)]
        subprocess.run(report, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, check=True, stdout=subprocess.DEVNULL)
        result["report_s"] = round(time.perf_counter() - began, 2)
    for name, value in result.items():
        print(f"{name:16}{f'{value:,}' if isinstance(value, int | float) else str(value):>12}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
