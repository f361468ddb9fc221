"""Judges that end when the test says so."""

import asyncio
from collections import defaultdict

from reward_loop import NaiveRewardLoopManager, RewardSample


class Gate:
    """An async reward function whose calls wait until they are let through; the score is the sample's number."""

    def __init__(self):
        self.calls = []
        self.cancelled = []
        self.now = self.most = 0
        self._through = defaultdict(asyncio.Event)
        self._called = asyncio.Condition()

    async def __call__(self, solution_str):
        self.calls.append(solution_str)
        self.now += 1
        self.most = max(self.most, self.now)
        async with self._called:
            self._called.notify_all()
        try:
            await self._through[solution_str].wait()
        except asyncio.CancelledError:
            self.cancelled.append(solution_str)
            raise
        finally:
            self.now -= 1
        return float(solution_str)

    def let(self, *names):
        for name in names:
            self._through[str(name)].set()

    async def called(self, count):
        async with self._called:
            await self._called.wait_for(lambda: len(self.calls) >= count)


def naive(function, **options):
    return NaiveRewardLoopManager(options, compute_score=function)


def numbered(count, start=0):
    return [RewardSample(str(start + i), uid=f"s{start + i}") for i in range(count)]


def scores(rewards):
    return [reward["reward_score"] for reward in rewards]
