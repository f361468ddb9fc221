"""Where rollouts wait for judges, and the figures of several such queues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_loop import QueueClosedError
from reward_loop.verl.separate_async import JudgingQueue, merge_metrics

pytestmark = pytest.mark.integration  # imports verl


async def turns(count: int = 30) -> None:
    """Lets everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


class Rollouts:
    """Prompts whose rollouts end when `generated` is set, and whose judges do when `judged` is."""

    def __init__(self, queue: JudgingQueue) -> None:
        self.queue = queue
        self.generated, self.judged = asyncio.Event(), asyncio.Event()
        self.begun: list[str] = []
        self.order: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, prompt: str, n: int = 2, step: int = 1) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self._prompt(prompt, n, step)))
        return self.tasks[-1]

    async def finish(self) -> None:
        self.generated.set()
        self.judged.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks)

    async def _prompt(self, prompt: str, n: int, step: int) -> None:
        async with self.queue.reserve(n) as places:
            self.begun.append(prompt)
            await asyncio.gather(*(self._session(places, prompt, i, step) for i in range(n)))

    async def _session(self, places: Any, prompt: str, session: int, step: int) -> None:
        await self.generated.wait()
        async with self.queue.turn(places, step=step):
            self.order.append((prompt, session))
            await self.judged.wait()
        self.done.append((prompt, session))

    def figures(self, step: int = 1) -> dict[str, float]:
        return {name.partition("/")[2]: value for name, value in self.queue.metrics(step).items()}


async def test_generation_continues_during_judging_until_the_queue_is_full() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=4, in_flight=2))
    rollouts.generated.set()
    for prompt in "abcde":
        rollouts.start(prompt)
    await turns()
    # Two are judged, four wait; the prompts that would not fit have not begun.
    assert rollouts.begun == ["a", "b", "c"]
    assert rollouts.order == [("a", 0), ("a", 1)]
    figures = rollouts.figures()
    assert (figures["judging"], figures["size"], figures["reserved"]) == (2, 4, 0)
    assert figures["waiting_producers"] == 2
    assert figures["producer_wait_s"] > 0
    await rollouts.finish()
    everything = [(prompt, session) for prompt in "abcde" for session in (0, 1)]
    assert rollouts.order == everything
    assert sorted(rollouts.done) == everything
    figures = rollouts.figures()
    assert (figures["judging"], figures["size"], figures["reserved"], figures["waiting_producers"]) == (0, 0, 0, 0)
    assert (figures["put"], figures["got"], figures["largest_size"]) == (10, 10, 4)


async def test_rollouts_in_generation_reserve_room() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=4, in_flight=1))
    for prompt in "abc":
        rollouts.start(prompt)
    await turns()
    assert rollouts.begun == ["a", "b"]
    assert rollouts.figures()["reserved"] == 4
    await rollouts.finish()
    assert rollouts.begun == ["a", "b", "c"]


async def test_a_prompt_that_would_never_fit_goes_in_alone() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=3, in_flight=1))
    rollouts.start("small")
    rollouts.start("large", n=5)
    rollouts.start("late")
    await turns()
    assert rollouts.begun == ["small"]
    await rollouts.finish()
    assert rollouts.begun == ["small", "large", "late"]


async def test_a_rollout_that_fails_gives_its_place_back() -> None:
    queue = JudgingQueue(capacity=2, in_flight=1)

    async def prompt(what: str) -> None:
        async with queue.reserve(2) as places:
            async with queue.turn(places, step=1):
                if what == "no reward":
                    raise ValueError(what)
            raise ValueError(what)

    for what in ("no rollout", "no reward"):
        with pytest.raises(ValueError, match=what):
            await prompt(what)
    async with asyncio.timeout(30), queue.reserve(2):
        assert queue.metrics(1)["reward_queue/reserved"] == 2
    assert queue.metrics(1)["reward_queue/reserved"] == 0


async def test_a_cancelled_prompt_releases_its_room() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=6, in_flight=1))
    rollouts.generated.set()
    first, second, third = (rollouts.start(prompt, n=1) for prompt in "abc")
    await turns()
    second.cancel()
    await turns()
    rollouts.tasks = [first, third]
    await rollouts.finish()
    assert [prompt for prompt, _ in rollouts.done] == ["a", "c"]
    figures = rollouts.figures()
    assert (figures["size"], figures["reserved"], figures["judging"]) == (0, 0, 0)


async def test_without_a_bound_all_are_judged_at_once_and_the_bound_on_places_holds() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=2, in_flight=None))
    rollouts.generated.set()
    for prompt in "abc":
        rollouts.start(prompt)
    await turns()
    assert len(rollouts.order) == 6
    await rollouts.finish()
    assert rollouts.figures()["largest_size"] <= 2


async def test_staleness_counts_what_waits_and_what_is_judged() -> None:
    rollouts = Rollouts(JudgingQueue(capacity=8, in_flight=1))
    rollouts.generated.set()
    rollouts.start("old", n=1, step=3)
    rollouts.start("new", n=3, step=5)
    await turns()
    figures = rollouts.figures(step=6)
    assert (figures["staleness_max"], figures["staleness_mean"]) == (1, 1)
    assert (figures["all_staleness_max"], figures["all_staleness_mean"]) == (3, 1.5)
    assert figures["oldest_s"] > 0
    await rollouts.finish()
    assert rollouts.figures(step=6)["all_staleness_max"] == 0


async def test_a_closed_queue_begins_nothing() -> None:
    queue = JudgingQueue(capacity=2, in_flight=1)
    queue.queue.close()
    with pytest.raises(QueueClosedError):
        async with queue.reserve(1):
            pass


def test_metrics_of_several_queues() -> None:
    def figures(**values: float) -> dict[str, float]:
        return {f"reward_queue/{name}": value for name, value in values.items()}

    one = figures(size=3, judging=1, oldest_s=2.0, staleness_max=2, staleness_mean=1.0, all_staleness_mean=1.0)
    other = figures(size=1, judging=3, oldest_s=5.0, staleness_max=1, staleness_mean=5.0, all_staleness_mean=3.0)
    assert merge_metrics([one, other]) == figures(
        size=4, judging=4, oldest_s=5.0, staleness_max=2, staleness_mean=2.0, all_staleness_mean=2.0
    )
    assert (
        merge_metrics([{**one, "reward_queue/size": 0, "reward_queue/judging": 0}])["reward_queue/staleness_mean"] == 0
    )
