from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reward_loop._util import event_loops
from reward_loop._util.event_loops import in_background, line_on_loop


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_runs_while_python_lists_its_threads(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """It stopped the whole process, without a message: python/cpython#106883."""
    of_python, collects = sys._current_frames, []

    def frames() -> Any:
        collects.append(gc.isenabled())
        return of_python()

    monkeypatch.setattr(sys, "_current_frames", frames)
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert line_on_loop(threading.get_ident()) is not None
        assert (collects, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_the_context_is_entered_and_left_in_another_thread() -> None:
    threads: list[threading.Thread] = []

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        threads.append(threading.current_thread())
        try:
            yield "address"
        finally:
            threads.append(threading.current_thread())

    with in_background(serving, name="served") as address:
        assert address == "address"
        assert [thread.name for thread in threads] == ["served"]
    assert threads[0] is threads[1]
    assert not threads[0].is_alive()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_errors_of_all_kinds_are_raised_in_the_callers_thread(kind: type[BaseException]) -> None:
    @asynccontextmanager
    async def failing(at: str) -> AsyncIterator[None]:
        if at == "entry":
            raise kind("at entry")
        try:
            yield
        finally:
            if at == "exit":
                raise kind("at exit")

    def construct() -> Any:
        raise kind("at construction")

    for new, where in ((construct, "construction"), (lambda: failing("entry"), "entry")):
        with pytest.raises(kind, match=f"at {where}"), in_background(new, name="x"):
            raise AssertionError("not reached")
    if kind is not asyncio.CancelledError:  # at the end, that is the cancellation itself
        with pytest.raises(kind, match="at exit"), in_background(lambda: failing("exit"), name="x"):
            pass


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_loop_in_a_task_is_raised_in_the_callers_thread(kind: type[BaseException]) -> None:
    async def fails() -> None:
        raise kind("in a task")

    @asynccontextmanager
    async def with_a_task() -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(fails())
        task.add_done_callback(lambda task: task.exception())  # retrieves it: otherwise asyncio logs it
        yield task

    with pytest.raises(kind, match="in a task"), in_background(with_a_task, name="x"):
        pass


def test_code_that_blocks_the_loop_does_not_block_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loops, "BLOCKED_S", 0.05)
    monkeypatch.setattr(event_loops, "_LOOK_S", 0.01)
    blocks, release = threading.Event(), threading.Event()

    async def block() -> None:
        blocks.set()
        release.wait()  # blocks the event loop

    @asynccontextmanager
    async def serving() -> AsyncIterator[asyncio.Task[None]]:
        yield asyncio.create_task(block())

    with in_background(serving, name="judging"):
        assert blocks.wait(60)
    release.set()
    (record,) = caplog.records
    message = record.getMessage()
    assert re.fullmatch(r"judging: its thread is left running, since block \(.*:\d+\) blocks it", message)


def test_the_interpreters_exit_leaves_it() -> None:
    code = """
from contextlib import asynccontextmanager
from reward_loop._util.event_loops import in_background

@asynccontextmanager
async def serving():
    try:
        yield
    finally:
        print("left", flush=True)

kept = in_background(serving, name="x")
kept.__enter__()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "left\n"
