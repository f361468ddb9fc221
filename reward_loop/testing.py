"""A fake judge server for tests of reward functions, with scripted and random faults.

Example with pytest:

    import pytest
    from reward_loop.testing import Drop, FakeJudge, Status

    @pytest.fixture
    def judge():
        with FakeJudge("Score: 7") as judge:
            yield judge

    async def test_a_busy_judge(judge):
        judge.script(Status(429, retry_after=1), Drop())     # the first two requests; then the normal reply
        ...
        assert judge.requests[0].body["messages"][-1]["content"].startswith("Rate the answer")
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from reward_loop._util.event_loops import in_background
from reward_loop._util.web_server import listen, url_of

__all__ = [
    "Answer",
    "BadJson",
    "Behaviour",
    "Body",
    "Drop",
    "FakeJudge",
    "Logits",
    "Received",
    "Stall",
    "Status",
]


@dataclass(frozen=True)
class Answer:
    """A chat reply with status 200."""

    text: str
    """The text of the reply."""
    finish_reason: str = "stop"
    """``stop`` for a complete reply, ``length`` for one that was cut off."""


@dataclass(frozen=True)
class Logits:
    """An answer to ``/classify`` or ``/v1/rerank``, with status 200."""

    values: tuple[float, ...]
    """The logits of the labels, or the scores of the documents."""


@dataclass(frozen=True)
class Body:
    """A JSON answer with status 200, for example one recorded from a real server."""

    json: Any
    """The body before encoding."""


@dataclass(frozen=True)
class Status:
    """An HTTP error, such as 429 or 503 (overloaded), 500 (internal error) or 401 (wrong API key)."""

    code: int
    """The HTTP status."""
    retry_after: float | None = None
    """Seconds for the ``Retry-After`` header; ``None`` for no header."""
    message: str = "scripted error of the fake judge"
    """The error message in the body."""


@dataclass(frozen=True)
class Stall:
    """The request hangs: there is no answer until the client disconnects or the fake judge stops."""


@dataclass(frozen=True)
class Drop:
    """The connection is closed before the answer."""


@dataclass(frozen=True)
class BadJson:
    """Status 200, with truncated JSON."""


Behaviour = Answer | Logits | Body | Status | Stall | Drop | BadJson


@dataclass(eq=False)
class Received:
    """A request that the fake judge received."""

    path: str
    """The URL's path."""
    headers: Mapping[str, str]
    """The headers; the case of their names does not matter."""
    body: Any
    """The decoded JSON body; bytes if the body is not JSON."""
    behaviour: Behaviour
    """The answer or the fault that the fake judge chose."""
    abandoned: bool = False
    """Whether the client disconnected, or the fake judge stopped, before the answer."""
    ended: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when the request was answered or abandoned; pass a timeout to `ended.wait`."""


class FakeJudge:
    """A fake HTTP server on the loopback interface, with the endpoints of a generative and a discriminative model.

    Endpoints: ``/v1/chat/completions`` (with or without ``/v1``), ``/classify``, ``/v1/rerank``, ``/v1/models`` and
    ``/health``. ``with`` and ``async with`` start and stop it. It runs in its own thread, so functions under test may
    block.
    """

    def __init__(
        self,
        reply: str | Callable[[Mapping[str, Any]], str] = "Score: 1",
        *,
        logit: float | Callable[[str], float] = 0.0,
        faults: Mapping[Behaviour, float] | None = None,
        latency: float | tuple[float, float] = 0.0,
        model: str = "fake-judge",
        seed: int = 0,
    ) -> None:
        """Defines the answers to requests that are not scripted.

        Args:
            reply: the text of chat replies, or a function that returns it for the decoded body of a request.
            logit: the logit of each text and the score of each reranked document, or a function that returns it for a
                text.
            faults: the probability of each random fault, which replaces the normal answer.
            latency: seconds before each answer, or a range ``(low, high)`` from which they are drawn uniformly.
            model: the model's name in answers.
            seed: the seed of random faults and latencies.
        """
        self.requests: list[Received] = []
        """All requests received so far, except those to ``/health`` and ``/v1/models``."""
        self.model = model
        self._reply = reply
        self._logit = logit
        self._faults = dict(faults or {})
        self._latency = latency if isinstance(latency, tuple) else (latency, latency)
        self._random = random.Random(seed)
        self._script: deque[Behaviour] = deque()
        self._stack = ExitStack()
        self._url = ""

    @property
    def address(self) -> str:
        """``host:port``, as in ``reward_router_address``."""
        return self._url.removeprefix("http://")

    @property
    def base_url(self) -> str:
        """``http://host:port/v1``, the ``base_url`` for an OpenAI client."""
        return f"{self._url}/v1"

    def script(self, *behaviours: Behaviour | str) -> None:
        """Sets the answers or faults for the next requests, one for each, in the order of their arrival.

        Args:
            behaviours: the answers and faults; a string stands for an `Answer` with this text.
        """
        self._script.extend(Answer(given) if isinstance(given, str) else given for given in behaviours)

    def __enter__(self) -> Self:
        self._url = self._stack.enter_context(in_background(self._serve, name="fake-judge"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def __aenter__(self) -> Self:
        # In a thread, since it waits for the thread of the server.
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stack.close)

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[str]:
        # 0: without a limit. Some prompts are larger than the default of 1 MB.
        app = web.Application(client_max_size=0)
        app.router.add_get("/{path:health|v1/models}", self._models)
        app.router.add_post("/{path:.*}", self._receive)
        # Handlers are cancelled when their client disconnects or the server stops, which sets `Received.abandoned`.
        # With a shutdown_timeout of 0, aiohttp would wait for a `Stall` indefinitely.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        try:
            listener = listen("127.0.0.1")
            await web.SockSite(runner, listener).start()
            yield url_of(listener)
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _receive(self, request: web.Request) -> web.Response:
        data = await request.read()
        try:
            body = json.loads(data)
        except ValueError:
            body = data
        received = Received(request.path, request.headers, body, self._choose(request.path, body))
        self.requests.append(received)
        try:
            await asyncio.sleep(self._random.uniform(*self._latency))
            return await self._behave(received, request)
        except asyncio.CancelledError:
            received.abandoned = True
            raise
        finally:
            received.ended.set()

    def _choose(self, path: str, body: Any) -> Behaviour:
        if self._script:
            return self._script.popleft()
        drawn = self._random.random()
        for fault, probability in self._faults.items():
            drawn -= probability
            if drawn < 0:
                return fault
        if path.endswith("/chat/completions"):
            return Answer(self._reply(body) if callable(self._reply) else self._reply)
        if path == "/classify":
            texts = [body.get("input") or body["messages"][-1]["content"]]
        elif path == "/v1/rerank":
            texts = body["documents"]
        else:
            return Status(404, message=f"unknown path {path}")
        return Logits(tuple(self._logit(text) if callable(self._logit) else self._logit for text in texts))

    async def _behave(self, received: Received, request: web.Request) -> web.Response:
        done = received.behaviour
        if isinstance(done, Stall):
            await asyncio.Event().wait()  # until the handler is cancelled
        if isinstance(done, Drop):
            if request.transport is not None:
                request.transport.abort()
            # aiohttp needs a response of the handler, although it cannot be sent any more.
            return web.Response()
        if isinstance(done, Status):
            headers = {} if done.retry_after is None else {"Retry-After": f"{done.retry_after:g}"}
            error = {"message": done.message, "type": "FakeJudgeError", "param": None, "code": done.code}
            return web.json_response({"error": error}, status=done.code, headers=headers)
        if isinstance(done, BadJson):
            return web.Response(text='{"choices": [', content_type="application/json")
        return web.json_response(done.json if isinstance(done, Body) else self._answer(done, received))

    def _answer(self, done: Behaviour, received: Received) -> Any:
        text = done.text if isinstance(done, Answer) else ""
        # Counts each word as one token, which is enough to test the accounting of usage.
        prompt, completion = len(json.dumps(received.body, default=str).split()), len(text.split())
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        answer = {"model": self.model, "usage": usage}
        if isinstance(done, Logits):
            scores = [{"index": i, "relevance_score": value} for i, value in enumerate(done.values)]
            return answer | {"results": scores, "data": [{"index": 0, "probs": done.values}]}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": getattr(done, "finish_reason", "stop")}
        return answer | {"id": "fake", "object": "chat.completion", "choices": [choice]}
