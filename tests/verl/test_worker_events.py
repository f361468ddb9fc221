from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop.errors import RewardLoopError
from reward_loop.verl import worker_events
from reward_loop.verl.progress import Progress
from reward_loop.verl.worker_events import Listener
from tests.local_ray import local_ray

pytestmark = pytest.mark.integration

STALL = "trainer.v1.reward_pipeline.stall_timeout_s"


def listener(
    progress: Progress,
    workers: Sequence[Any] = (),
    *,
    stall_timeout_s: float | None = None,
    recover: Callable[[Collection[int]], Collection[str]] = lambda dead: (),
    resync: Callable[[], None] = lambda: None,
    poll: Callable[[], None] = lambda: None,
) -> Listener:
    return Listener(
        workers,
        progress,
        recover=recover,
        resync=resync,
        poll=poll,
        stall_timeout_s=stall_timeout_s,
        stall_option=STALL,
    )


class Worker:
    """Answers as an agent loop worker does."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[list[tuple[str, str]]] = asyncio.Queue()

    async def next_events(self) -> list[tuple[str, str]]:
        return await self._events.get()

    async def unfinished_prompts(self) -> dict[str, str]:
        return {"a": "sessions [0] are being generated", "z": "finished for the trainer"}

    async def emit(self, *events: tuple[str, str]) -> None:
        await self._events.put(list(events))

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_worker_niceness": "0"}
    with local_ray(runtime_env={"env_vars": environment}):
        yield


def test_events_arrive_also_from_the_replacement_of_a_dead_worker(cluster: None) -> None:
    import ray

    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    other = ray.remote(Worker).options(num_cpus=0).remote()
    progress = Progress()
    progress.submit(["a", "b", "c", "d"])

    def recover(dead: Collection[int]) -> set[str]:
        assert dead == [1]
        assert progress.pending == 2
        ray.get(other.emit.remote(("generated", "d")))
        workers[1] = other
        return {"b", "c", "d"}

    def resync() -> None:
        if other in workers:  # `b` was judged again, and `d` is generated again
            progress.record_tags({"b": {"status": "finished"}, "d": {"status": "pending"}}, 0.0)

    with listener(progress, workers, recover=recover, resync=resync, stall_timeout_s=300) as listening:
        ray.get(workers[0].emit.remote(("judging", "a_0"), ("generated", "a")))
        ray.get(workers[1].emit.remote(("judging", "b_0"), ("over", "c"), ("generated", "d"), ("generated", "b")))
        listening.wait("rollouts", lambda: not progress.generating)
        workers[1].die.remote()
        listening.wait("rollouts", lambda: "d" in progress.generating)
        assert progress.unfinished == {"a", "d"}
        assert progress.pending == 1
        listening.wait("rollouts", lambda: not progress.generating)


def test_a_recovery_that_fails_ends_the_wait_and_the_missing_prompts_are_named(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def recover(dead: Collection[int]) -> set[str]:
        raise RewardLoopError(f"workers {dead} cannot be replaced")

    monkeypatch.setattr(worker_events, "ANSWER_S", 120.0)
    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    progress = Progress()
    progress.submit(["a", "b"])
    with listener(progress, workers, recover=recover, stall_timeout_s=300) as listening:
        workers[1].die.remote()
        with pytest.raises(RewardLoopError, match=r"workers \[1\] cannot be replaced") as caught:
            listening.wait("rewards", lambda: False)
    missing = str(caught.value)
    assert "agent loop worker 0 of 2, prompt a: sessions [0] are being generated" in missing
    assert "agent loop worker 1 of 2 is dead" in missing
    assert "no answering worker has prompt b" in missing
    assert "prompt z" not in missing


def test_a_wait_without_events_fails_and_names_the_missing_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_events, "RESYNC_S", 0.01)
    progress = Progress()
    progress.submit(["d"])
    with pytest.raises(
        RewardLoopError, match=rf"(?s)nothing happened .*waited for rewards \({STALL}=0\.05\).*prompt d"
    ):
        listener(progress, stall_timeout_s=0.05).wait("rewards", lambda: not progress.unfinished)


def test_a_run_that_must_stop_does_not_wait_for_the_other_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_events, "RESYNC_S", 0.01)
    progress = Progress()
    progress.submit(["a"])

    def poll() -> None:
        progress.record(("judging", f"a_{progress.pending}"), 0.0)  # others are still judged
        if progress.pending > 3:
            raise RewardLoopError("the budget is spent")

    with pytest.raises(RewardLoopError, match="the budget is spent"):
        listener(progress, poll=poll, stall_timeout_s=0.1).wait("rewards", lambda: not progress.unfinished)


def test_the_recovery_from_a_death_may_take_longer_than_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(worker_events, "RESYNC_S", 0.01)
    monkeypatch.setattr(worker_events, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress()
    progress.submit(["a"])

    def recover(dead: Collection[int]) -> set[str]:
        now[0] += 100  # another worker has started
        return {"a"}

    listening = listener(progress, ["other"], stall_timeout_s=60, recover=recover)
    listening._dead = {0}
    answers = chain([False] * 3, repeat(True))
    listening.wait("rollouts", lambda: next(answers))


def test_events_that_only_transfer_queue_has_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_events, "RESYNC_S", 0.01)
    progress = Progress()
    progress.submit(["a"])
    resynced = threading.Event()

    def resync() -> None:
        progress.record(("over", "a"), 0.0)
        resynced.set()

    listener(progress, stall_timeout_s=60, resync=resync).wait("rewards", lambda: not progress.unfinished)
    assert resynced.is_set()
