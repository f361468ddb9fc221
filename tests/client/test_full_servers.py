"""Requests to servers that are full, and say so without a ``Retry-After``."""

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop._util import retry_after
from reward_loop.client import chat_complete
from reward_loop.errors import RequestError
from reward_loop.testing import FakeJudge, Status
from tests.support.clock import hastened, until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry_after, "FIRST_S", 0.1)
    monkeypatch.setattr(retry_after, "LONGEST_S", 1.0)


ANSWER = {"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}]}
SECONDS = 0.5


class Engine:
    """A server with 8 places."""

    def __init__(self, status):
        self.status, self.now, self.counts = status, 0, Counter()

    async def chat(self, request):
        await request.read()
        if self.now >= 8:
            self.counts["refused"] += 1
            return web.json_response({"error": "full"}, status=self.status)
        self.now += 1
        await asyncio.sleep(SECONDS)
        self.now -= 1
        self.counts["accepted"] += 1
        return web.json_response(ANSWER)

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()


@pytest.mark.parametrize(("status", "is_url"), [(429, True), (503, False)])
async def test_requests_wait_for_a_free_place_outside_the_deadline(status, is_url):
    async with Engine(status) as engine:
        address = f"http://{engine.address}/v1" if is_url else engine.address

        async def judge(solution_str):
            await chat_complete(address, solution_str)
            return 1.0

        # 64 calls of 0.5 s in 8 places take at least 4 s.
        options = RewardLoopConfig(timeout=3, retry={"max_attempts": 1})
        function = ScoringFunction(judge, options=options)
        results = await hastened(asyncio.gather(*(function(RewardSample(str(number))) for number in range(64))))
        assert Counter(str(result.outcome) for result in results) == {"scored": 64}
        assert max(result.wait_s for result in results) > 3


async def test_a_server_that_is_full_of_the_requests_of_others_is_asked_again_after_a_pause():
    async with Engine(429) as engine:
        await chat_complete(engine.address, "first")
        engine.now = 8

        async def leave():
            await until(lambda: engine.counts["refused"] == 3)
            engine.now = 0

        leaving = asyncio.create_task(leave())
        assert (await hastened(chat_complete(engine.address, "second"))).text == "1"
        await leaving


async def test_a_request_that_is_refused_whatever_the_load_ends(monkeypatch):
    monkeypatch.setattr(retry_after, "LONGEST_S", 0.01)
    async with FakeJudge() as server:
        server.script(*[Status(503)] * 20)
        with pytest.raises(RequestError, match="status 503"):
            await chat_complete(server.address, "poison")
        assert len(server.requests) == 10
