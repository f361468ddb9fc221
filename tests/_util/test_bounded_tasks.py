import asyncio
from collections.abc import Iterator

from reward_loop._util.bounded_tasks import STARTS_PER_TURN, BoundedTasks


class Work:
    """Numbered pieces of work, each of which ends when the test says so."""

    def __init__(self, count: int, limit: int | None = None, suppressed: int = 0) -> None:
        self.left: Iterator[int] = iter(range(count))
        self.suppressed = suppressed
        self.started: list[int] = []
        self.ended: list[asyncio.Task[None]] = []
        self.cancellations = 0
        self.change = asyncio.Condition()
        self.may_end: dict[int, asyncio.Event] = {}
        self.tasks = BoundedTasks(self.next, self.ended.append, limit)
        self.tasks.fill()

    def next(self) -> asyncio.Task[None] | None:
        number = next(self.left, None)
        return None if number is None else asyncio.create_task(self.run(number))

    async def run(self, number: int) -> None:
        event = self.may_end[number] = asyncio.Event()
        self.started.append(number)
        async with self.change:
            self.change.notify_all()
        while not event.is_set():
            try:
                await event.wait()
            except asyncio.CancelledError:
                self.cancellations += 1
                if self.cancellations > self.suppressed:
                    raise

    async def has_started(self, count: int) -> None:
        async with asyncio.timeout(30), self.change:
            await self.change.wait_for(lambda: len(self.started) >= count)


async def test_work_starts_in_order_when_an_earlier_task_ends_and_is_taken_only_then() -> None:
    work = Work(5, limit=2)
    assert work.started == []
    await work.has_started(2)
    await asyncio.sleep(0)
    assert (work.started, len(work.tasks.tasks)) == ([0, 1], 2)
    work.may_end[1].set()
    await work.has_started(3)
    assert work.started == [0, 1, 2]
    assert list(work.left) == [3, 4]  # has not been taken


async def test_draining_waits_for_all_work() -> None:
    work = Work(7, limit=3)
    draining = asyncio.create_task(work.tasks.drain())
    for number in range(7):
        await work.has_started(number + 1)
        assert not draining.done()
        work.may_end[number].set()
    await asyncio.wait_for(draining, 30)
    assert (len(work.ended), work.tasks.tasks) == (7, set())


async def test_many_tasks_start_in_several_turns_of_the_event_loop() -> None:
    work = Work(3 * STARTS_PER_TURN)
    await asyncio.sleep(0)
    assert len(work.tasks.tasks) == STARTS_PER_TURN
    await work.has_started(3 * STARTS_PER_TURN)
    assert await work.tasks.end(30) == 0


async def test_a_task_that_does_not_end_is_reported_and_gets_one_cancellation() -> None:
    work = Work(2, limit=1, suppressed=10**9)
    await work.has_started(1)
    assert await work.tasks.end(0.05) == 1
    cancellations = work.cancellations
    work.may_end[0].set()  # or the event loop would wait for it
    await work.has_started(2)
    work.may_end[1].set()
    await asyncio.wait_for(work.tasks.drain(), 30)
    assert cancellations == 1
