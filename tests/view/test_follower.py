"""The follower reads new rows, reports changes, survives errors, and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from reward_loop.records import Records
from reward_loop.view.follower import Follower
from reward_loop.view.index import Index
from tests.view.recorded import flushed, record


@pytest.fixture
def writer(tmp_path: Path) -> Records:
    writer = Records(tmp_path / "rewards")
    record(writer, "first")
    return flushed(writer)


async def test_changes_are_reported_until_it_stops(writer: Records) -> None:
    with Index(writer.path.parent) as index:
        index.update()
        follower = Follower(index)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            tasks.create_task(follower.run())
            revisions = follower.revisions(at_least_every_s=60)
            first = await anext(revisions)
            record(writer, "second")
            assert await anext(revisions) > first
            assert len(index.rows("SELECT id FROM samples")) == 2
            waiting = asyncio.ensure_future(anext(revisions, None))
            await follower.stop()
            assert await waiting is None


async def test_the_state_is_reported_at_intervals_without_a_change(writer: Records) -> None:
    with Index(writer.path.parent) as index:
        index.update()
        revisions = Follower(index).revisions(at_least_every_s=0.01)
        async with asyncio.timeout(60):
            assert await anext(revisions) == await anext(revisions)


async def test_an_error_is_kept_until_reading_works_again(writer: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(writer.path.parent) as index:
        index.update()
        follower = Follower(index)
        update, seen = index.update, asyncio.Event()
        loop = asyncio.get_running_loop()

        def fails() -> bool:
            if follower.problem is None:
                raise OSError("the disk is full")
            loop.call_soon_threadsafe(seen.set)
            return update()

        monkeypatch.setattr(index, "update", fails)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            tasks.create_task(follower.run())
            revisions = follower.revisions(at_least_every_s=60)
            await anext(revisions)
            await seen.wait()
            record(writer, "second")
            await anext(revisions)
            assert follower.problem is None
            await follower.stop()


async def test_an_error_is_shown(writer: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(writer.path.parent) as index:
        follower = Follower(index)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fails() -> bool:
            loop.call_soon_threadsafe(stopping.set)
            raise OSError("the disk is full")

        monkeypatch.setattr(index, "update", fails)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            running = tasks.create_task(follower.run())
            await stopping.wait()
            await follower.stop()
            await running
        assert follower.problem == "the disk is full"
