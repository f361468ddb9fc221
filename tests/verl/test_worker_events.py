from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_loop.errors import RewardLoopError
from reward_loop.verl.progress import Progress

pytestmark = pytest.mark.integration


class Worker:
    """Answers as an agent loop worker does."""

    def __init__(self) -> None:
        self._news: asyncio.Queue[list[tuple[str, str]]] = asyncio.Queue()

    async def news(self) -> list[tuple[str, str]]:
        return await self._news.get()

    async def in_work(self) -> dict[str, str]:
        return {"a": "sessions [0] are being generated", "z": "nobody asked for this one"}

    async def tell(self, *events: tuple[str, str]) -> None:
        await self._news.put(list(events))

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_worker_niceness": "0"}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=10**8, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def test_what_the_workers_tell_arrives_and_their_death_ends_the_wait(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from reward_loop.verl import worker_events
    from reward_loop.verl.worker_events import Listener

    monkeypatch.setattr(worker_events, "ANSWER_S", 120.0)

    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    progress = Progress()
    progress.submit(["a", "b", "c"])
    with Listener(workers, progress) as listener:
        assert not listener.wait(lambda: False, timeout=0.01)
        ray.get(workers[0].tell.remote(("judging", "b"), ("generated", "b")))
        ray.get(workers[1].tell.remote(("over", "c")))
        assert listener.wait(lambda: progress.generating == {"a"} and "c" not in progress.unfinished, timeout=300)
        assert progress.pending == 1
        workers[1].die.remote()
        with pytest.raises(RewardLoopError, match="agent loop worker 1 of 2 is lost"):
            listener.wait(lambda: False, timeout=300)
        missing = listener.at_work_on(progress.unfinished)
    assert "agent loop worker 0 of 2, prompt a: sessions [0] are being generated" in missing
    assert "agent loop worker 1 of 2 is dead" in missing
    assert "no worker that answers has prompt b" in missing
    assert "nobody asked" not in missing
