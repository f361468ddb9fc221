from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager, RewardSample
from reward_loop._util.framing import frame
from reward_loop.records import ActiveSample, watch, watchdog
from reward_loop.records.watchdog import ask, processes
from tests.gsm8k import ROOT

STUCK = """
import asyncio, sys, threading
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample

def compute_score(solution_str):
    if solution_str == "last":
        print("ready", flush=True)
    threading.Event().wait()

async def main():
    manager = NaiveRewardLoopManager(RewardLoopConfig(watchdog_s=None), compute_score=compute_score)
    await asyncio.gather(*(manager.run_single(RewardSample(s, uid=s)) for s in ["first", "last"]))

asyncio.run(main())
"""


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
    assert re.match(r"\d+ samples have been running for more than 0\.01 s, 1 of them only for a permit", message)
    assert message.index("sample q7") < message.index("sample q6")  # what does not only wait for a limit comes first
    # Samples of managers with another `watchdog_s` are not old yet, or are never logged.
    assert "sample q8" not in message
    assert "sample q9" not in message
    assert "sample q7 (data source 'gsm8k') in f (a.py), waits for POST http://judge/v1/chat/completions" in message


def test_another_process_is_asked_for_its_oldest_samples(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert process.pid in processes()
            report = ask(process.pid, timeout=60)
        finally:
            process.kill()
    assert report["pid"] == process.pid
    assert "stuck.py" in report["command"]
    assert report["running"] == 2
    assert [call["uid"] for call in report["oldest"]] == ["first", "last"]
    assert "compute_score" in report["oldest"][0]["function"]
    stacks = [lines for name, lines in report["threads"].items() if name.startswith("reward-function")]
    assert len(stacks) == 2
    assert any("stuck.py" in line for lines in stacks for line in lines)
    # Killed, it leaves nothing behind.
    assert process.pid not in processes()
    with pytest.raises(OSError, match="refused"):
        ask(process.pid)


def test_a_socket_whose_name_ends_without_a_process_id_is_left_out() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{watchdog._name('x')}")
        assert isinstance(processes(), list)


def test_a_client_that_disconnects_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch()
    for said in (b"", frame(b"nonsense"), b"a frame that is too long", frame(b'["report"]')):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{watchdog._name(os.getpid())}")
            connection.sendall(said)
    with pytest.raises(ConfigError, match="unknown question 'the weather'"):
        ask(os.getpid(), 60, "the weather")  # after all of them
    # Samples of earlier tests may be logged.
    logged = [record.getMessage() for record in caplog.records if record.name.endswith("watchdog")]
    assert [message for message in logged if "have been running for more than" not in message] == []


async def test_the_watchdog_answers_while_the_event_loop_is_blocked() -> None:
    watch()
    with ActiveSample(RewardSample("x", uid="here"), "f"):
        answered = ask(os.getpid(), timeout=60)  # on the loop, which this blocks
    assert "here" in [call["uid"] for call in answered["oldest"]]
    await asyncio.sleep(0)


async def test_the_line_that_blocks_an_event_loop_is_reported_and_logged(
    monkeypatch: pytest.MonkeyPatch, messages: queue.Queue[str]
) -> None:
    monkeypatch.setattr(watchdog, "_BLOCKED_NOW_S", 0.05)
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.05)
    blocks, release = threading.Event(), threading.Event()

    async def compute_score(solution_str: str) -> float:
        blocks.set()
        release.wait()  # blocks the event loop
        return 1.0

    def score() -> None:
        manager = NaiveRewardLoopManager(compute_score=compute_score)
        asyncio.run(manager.run_single(RewardSample("x", uid="blocks")))

    scoring = asyncio.create_task(asyncio.to_thread(score))
    line = rf"compute_score \({re.escape(Path(__file__).name)}:\d+\)"
    try:
        await asyncio.to_thread(blocks.wait, 60)
        answer = await asyncio.to_thread(ask, os.getpid(), 60)
        (found,) = answer["blocked"]
        assert re.fullmatch(line, found["line"])
        assert any("compute_score" in entry for stack in answer["threads"].values() for entry in stack)
        while not re.search(f"blocked for .* by {line}", await asyncio.to_thread(messages.get, timeout=60)):
            pass
    finally:
        release.set()
        await scoring
    assert (await asyncio.to_thread(ask, os.getpid(), 60))["blocked"] == []


def test_a_watchdog_that_fails_at_once_each_time_does_not_spin() -> None:
    class Ended(BaseException):
        pass

    class Failing(watchdog._Watchdog):
        def __init__(self) -> None:
            self.asked: list[float] = []

        def _answer(self, listener: socket.socket) -> None:
            self.asked.append(time.monotonic())
            raise OSError("too many open files") if len(self.asked) == 1 else Ended

    failing = Failing()
    with socket.socket() as listener, pytest.raises(Ended):
        failing._run(listener)
    assert failing.asked[1] - failing.asked[0] > 0.9


START = """
import asyncio, threading
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.records.watchdog import processes
import os, sys

def threads():
    return sorted(t.name for t in threading.enumerate() if t.name in ("reward-watchdog", "reward-records"))

manager = NaiveRewardLoopManager(RewardLoopConfig(log_dir=sys.argv[1]), compute_score=lambda: 1.0)
assert threads() == [] and os.getpid() not in processes()
asyncio.run(manager.run_single(RewardSample("x")))
assert threads() == ["reward-records", "reward-watchdog"] and os.getpid() in processes()
"""


def test_threads_and_socket_start_with_the_first_sample_and_not_with_a_manager(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", START, str(tmp_path)], check=True, env=environment, timeout=120)
