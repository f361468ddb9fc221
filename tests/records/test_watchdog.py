from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.records import ActiveSample, watch, watchdog
from tests.support.gsm8k import ROOT


@pytest.fixture
def messages() -> Iterator[queue.Queue[str]]:
    """What the watchdog logs."""
    found: queue.Queue[str] = queue.Queue()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.put(record.getMessage())

    heard = Heard()
    logger = logging.getLogger("reward_loop.records.watchdog")
    logger.addHandler(heard)
    yield found
    logger.removeHandler(heard)


def test_samples_that_run_too_long_are_logged_with_their_names(
    monkeypatch: pytest.MonkeyPatch, messages: queue.Queue[str]
) -> None:
    monkeypatch.setattr(watchdog, "_LOGGED", 1000)  # earlier tests may have left calls that are older
    with (
        ActiveSample(RewardSample("x", uid="q6"), "f (a.py)", 0.01) as queued,
        ActiveSample(RewardSample("x", uid="q7", data_source="gsm8k"), "f (a.py)", 0.01) as call,
        ActiveSample(RewardSample("x", uid="q8"), "f (a.py)", 1000),
        ActiveSample(RewardSample("x", uid="q9"), "f (a.py)"),
    ):
        queued.ask("limit 'judge'")
        call.ask("POST http://judge/v1/chat/completions")
        watch()
        while "sample q7" not in (message := messages.get(timeout=60)):
            pass  # it was not old enough yet, and others were
    assert re.match(r"\d+ samples have been running for more than 0\.01 s; the oldest", message)
    assert "sample q6" not in message  # it only waits for a limit
    # Samples of managers with another `watchdog_s` are not old yet, or are never logged.
    assert "sample q8" not in message
    assert "sample q9" not in message
    assert "sample q7 (data source 'gsm8k') in f (a.py), waits for POST http://judge/v1/chat/completions" in message


@pytest.mark.processes
async def test_the_line_that_blocks_an_event_loop_is_logged(
    monkeypatch: pytest.MonkeyPatch, messages: queue.Queue[str]
) -> None:
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.05)
    release = threading.Event()

    async def compute_score(solution_str: str) -> float:
        release.wait()  # blocks the event loop
        return 1.0

    def score() -> None:
        manager = NaiveRewardLoopManager(compute_score=compute_score)
        asyncio.run(manager.run_single(RewardSample("x", uid="blocks")))

    scoring = asyncio.create_task(asyncio.to_thread(score))
    line = rf"compute_score \({re.escape(Path(__file__).name)}:\d+\)"
    try:
        while not re.search(f"blocked for .* by {line}", await asyncio.to_thread(messages.get, timeout=60)):
            pass
    finally:
        release.set()
        await scoring


START = """
import asyncio, threading
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
import sys

def threads():
    return sorted(t.name for t in threading.enumerate() if t.name in ("reward-watchdog", "reward-records"))

manager = NaiveRewardLoopManager(RewardLoopConfig(log_dir=sys.argv[1]), compute_score=lambda: 1.0)
assert threads() == []
asyncio.run(manager.run_single(RewardSample("x")))
assert threads() == ["reward-records", "reward-watchdog"]
"""


@pytest.mark.processes
def test_threads_start_with_the_first_sample_and_not_with_a_manager(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", START, str(tmp_path)], check=True, env=environment, timeout=120)
