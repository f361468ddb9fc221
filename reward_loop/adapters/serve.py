"""``reward-loop serve``: a reward function behind ``POST /score``, for every program that can send a request.

Invariants:

- A request without the key, or of a web page, is refused before its body is read.
- Each accepted sample belongs to one request. It ends with a result, or is cancelled with its request: when the client
  disconnects, or the service stops.
- At most `max_in_flight` samples are accepted at a time; `concurrency` of them run.
- After the first signal, no sample is accepted, and accepted ones have `grace_s` seconds to end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from reward_loop._util.api_keys import CHALLENGE, has_key
from reward_loop._util.json import encode
from reward_loop._util.process import raise_descriptor_limit
from reward_loop._util.text import did_you_mean, shorten
from reward_loop._util.web_server import (
    api_key,
    is_foreign_origin,
    is_known_host,
    open_listener,
    own_names,
    serve_until_signal,
    stop_on_disconnect,
    url_of,
)
from reward_loop.agent import PendingRewards, RewardAgent
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.managers.scorer import Scorer, load_scorer, scores_groups
from reward_loop.offline import cli_options
from reward_loop.scoring.signature import BY_NAME
from reward_loop.types import RewardResult, RewardSample

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
"""The longest body of a request."""

CLOSING_S = 15
"""Seconds, after the grace period, for cancelled samples to end and their answers to be sent."""

_FIELDS = frozenset(field.name for field in fields(RewardSample))

_PARTS = frozenset({"ground_truth", "data_source", *BY_NAME}) - {"uid"}
"""The arguments of a function that come from a request, and may be missing there. Each sample gets a uid."""

_STOPPING = "the service is stopping"


class RewardService:
    """The ASGI app, and an async context manager, which owns the agent: as an app, during its lifespan.

    Args:
        scorer: the function with its manager; the agent closes the manager.
        key: the API key, as a bearer token or as the password of HTTP Basic, which clients can have in a URL; ``None``
            if none is needed.
        concurrency: how many samples are scored at a time.
        max_in_flight: how many samples are accepted at a time. By default 16 times `concurrency`.
        grace_s: seconds that accepted samples have to end after a signal.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        key: str | None = None,
        concurrency: int = 64,
        max_in_flight: int | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self.in_flight = 0
        self.stopping = False
        self.requires = scorer.requires
        self.needs_groups = scores_groups(scorer.manager)
        """Whether samples can be scored only together with the other samples of their group."""
        self.name = str(getattr(scorer.manager, "name", type(scorer.manager).__name__))
        self._key = None if key is None else key.encode()
        self._max_in_flight = 16 * concurrency if max_in_flight is None else max_in_flight
        self._grace_s = grace_s
        self._agent = RewardAgent(scorer.manager, concurrency=concurrency)
        self._pending: set[PendingRewards] = set()
        self._uids = secrets.token_hex(3)
        self._requests = 0
        self._ended: Callable[[], None] | None = None
        """Called when the service stops and no sample is in flight."""
        self._app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._answer, methods=["POST"])],
            exception_handlers={HTTPException: _refused, ClientDisconnect: _gone},
            lifespan=self._live,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def __aenter__(self) -> Self:
        await self._agent.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.stopping = True
        await self._agent.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        async with self:
            yield

    async def _health(self, _: Request) -> Response:
        if self.stopping:
            raise HTTPException(503, _STOPPING)
        return _reply({"status": "ok"})

    async def _answer(self, request: Request) -> Response:
        self._check_sender(request)
        content = await _json(request)
        is_many = isinstance(content, dict) and "samples" in content
        if is_many and len(content) > 1:
            other = shorten(next(name for name in content if name != "samples"))
            raise HTTPException(422, f"unknown field {other} beside samples: each sample has its own fields")
        rows = content["samples"] if is_many else [content]
        if not isinstance(rows, list) or not rows:
            raise HTTPException(422, "samples must be a list with at least one sample")
        self._requests += 1
        given = [self._sample(row, index) for index, row in enumerate(rows)]
        groups = self._members(given)
        order = [index for members in groups for index in members]
        # The agent sets the group: those of another request with the same name are other groups.
        samples = [replace(given[index], group=None, group_size=None) for index in order]
        results = await self._score(samples, [len(members) for members in groups], request.receive)
        shown = dict(zip(order, map(_shown, samples, results), strict=True))
        return _reply({"results": [shown[index] for index in range(len(given))]} if is_many else shown[0])

    def _sample(self, row: Any, index: int) -> RewardSample:
        """Return a sample, with a unique name where it has none."""
        if not isinstance(row, dict):
            raise HTTPException(422, f"sample {index} must be an object with solution_str")
        if unknown := sorted(row.keys() - _FIELDS):
            hint = did_you_mean(unknown[0], _FIELDS)
            raise HTTPException(422, f"sample {index} has an unknown field {shorten(unknown[0])}{hint}")
        # The argument `global_steps` is the field `step`, and the tokens have a length.
        given = row.keys() | ({"response_length"} if "response_ids" in row else set())
        required = {"step" if name == "global_steps" else name for name in self.requires & _PARTS}
        if missing := sorted(required - given):
            why = f"which {self.name} requires: send it, or give the parameter a default"
            raise HTTPException(422, f"sample {index} has no {missing[0]}, {why}")
        try:
            uid = f"{self._uids}.{self._requests}.{index}"
            sample = _validator().validate_python({**row, "uid": uid} if row.get("uid") is None else row)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]  # without the value, which may be long
            where = ".".join(map(str, problem["loc"]))
            raise HTTPException(422, f"sample {index}, {where}: {problem['msg']}") from None
        if sample.response_length is None and sample.response_ids is not None:
            sample = replace(sample, response_length=len(sample.response_ids))
        return sample

    def _check_sender(self, request: Request) -> None:
        if self._key is not None:
            if not has_key(request.headers.get("authorization", "").encode("latin-1"), self._key, basic=True):
                raise HTTPException(
                    401,
                    "the API key is missing or wrong: send it as a bearer token, or in the URL as "
                    "http://key:KEY@host:port/score",
                    CHALLENGE,
                )
            return
        # A page in a browser on this machine could spend the budget of a judge.
        host = request.headers.get("host", "localhost")
        known = is_known_host(host, own_names(), any_address=True)
        if not known or is_foreign_origin(request.headers.get("origin"), host):
            raise HTTPException(403, "requests of web pages are refused: use the IP address, or set --api-key-env")

    def _members(self, samples: Sequence[RewardSample]) -> list[list[int]]:
        """Return the indices of the samples of each group; samples without a group are groups of their own."""
        groups: dict[str | int, list[int]] = {}
        for index, sample in enumerate(samples):
            if sample.group is None and self.needs_groups:
                raise HTTPException(
                    422,
                    f"sample {index} has no group, and {self.name} compares the samples of a group: send "
                    "all samples of a prompt in one request, with the same group",
                )
            # An index is never equal to a name, which is text.
            groups.setdefault(index if sample.group is None else sample.group, []).append(index)
        return list(groups.values())

    async def _score(self, samples: list[RewardSample], groups: list[int], receive: Receive) -> list[RewardResult]:
        # No `await` before the samples are counted: two requests must not get the same room.
        self._check_room(len(samples))
        try:
            pending = self._agent.submit(samples, groups=groups)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        self._pending.add(pending)
        self.in_flight += len(samples)
        results: list[RewardResult] = []

        async def collect() -> None:
            results.extend(await pending.results())

        try:
            if not await stop_on_disconnect(receive, collect):
                raise ClientDisconnect
        except RewardsCancelledError:
            raise HTTPException(503, "the service stopped before all samples were scored") from None
        except RewardLoopError as error:  # the policy `raise`, too many failures, or an error of the manager
            logger.warning("%s", error)
            raise HTTPException(500, str(error)) from error
        finally:
            pending.cancel()  # if this request ended early, its samples would run on
            self._pending.discard(pending)
            self.in_flight -= len(samples)
            self._end_if_idle()
        return results

    def _check_room(self, count: int) -> None:
        if self.stopping:
            raise HTTPException(503, _STOPPING)
        most = f"at most {self._max_in_flight} are accepted at a time"
        if count > self._max_in_flight:
            raise HTTPException(413, f"the request has {count} samples, and {most}: send fewer, or raise --concurrency")
        if self.in_flight + count > self._max_in_flight:
            raise HTTPException(
                429, f"{self.in_flight} samples are in flight, and {most}: send it again later, or raise --concurrency"
            )

    def stop_from_signal(self, ended: Callable[[], None]) -> None:
        """Accept no more samples, and cancel the accepted ones after the grace period; a second call cancels them now.

        May be called by a signal handler or by another thread. ``ended`` is called when no sample is in flight.
        """
        loop = self._agent.loop
        if loop is None or loop.is_closed():
            ended()
        else:
            loop.call_soon_threadsafe(self._stop, ended)

    def _stop(self, ended: Callable[[], None]) -> None:
        if self.stopping:
            self._cancel_all()
            return
        self.stopping = True
        self._ended = ended
        if self.in_flight:
            logger.info(
                "stopping: %d samples in flight have %g s to end; Ctrl-C cancels them", self.in_flight, self._grace_s
            )
        asyncio.get_running_loop().call_later(self._grace_s, self._cancel_all)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._ended is not None and not self.in_flight:
            self._ended()

    def _cancel_all(self) -> None:
        # A copy: a request removes its batch when it ends.
        for pending in list(self._pending):
            pending.cancel()


def _reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    headers = {"retry-after": "1"} if status in (429, 503) else headers
    return Response(encode(content), status, headers, "application/json")


async def _refused(_: Request, error: Any) -> Response:
    return _reply({"error": error.detail}, error.status_code, error.headers)


async def _gone(_: Request, error: Exception) -> Response:
    return _reply(None, 499)  # the client has disconnected


async def _json(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes: send fewer samples in a request")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None


@functools.cache
def _validator() -> TypeAdapter[RewardSample]:
    return TypeAdapter(RewardSample)


def _shown(sample: RewardSample, result: RewardResult) -> dict[str, Any]:
    return {
        "uid": sample.uid,
        "score": result.reward,
        "outcome": str(result.outcome),
        "error": result.reason,
        "components": result.components,
        "reward_extra_info": result.to_reward()["reward_extra_info"],
    }


def serve(
    context: typer.Context,
    function: cli_options.Function,
    host: Annotated[str, typer.Option(help="Address to listen on. Without a key, only loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8090,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable that contains the key for requests.", show_default=False
        ),
    ] = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples that are scored at a time.")] = 64,
    timeout: Annotated[
        float, typer.Option(min=0, help="Time limit of the function for a sample, in seconds; 0 for no limit.")
    ] = 100,
    isolation: cli_options.Isolation = "thread",
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Record every sample with its exchanges with judges in this folder.", show_default=False),
    ] = None,
    grace: Annotated[int, typer.Option(min=0, help="Seconds for samples in flight to end after Ctrl-C.")] = 30,
    option: cli_options.MoreOptions = None,
) -> None:
    """Serve a reward function over HTTP, for every trainer that can send a request.

    [cyan]/score[/] takes one sample or many, with groups; docs/trainers.md shows
    requests, replies, and what to set in each trainer.

    [bold]Example[/]

      reward-loop serve reward.py:compute_score

      curl http://127.0.0.1:8090/score --json '{"solution_str": "4", "ground_truth": "4"}'

    A sample without a score has [cyan]"score": null[/]. Choose a number with
    -O on_failed=default -O on_unscored=default -O default_score=0.

    [cyan]/health[/] answers 200 while samples are accepted. Ctrl-C lets the samples in
    flight end.
    """
    key = api_key(api_key_env)
    given = {
        "timeout": timeout or None,
        "max_threads": concurrency,
        "isolation": isolation,
        "max_failed_share": 1.0,  # the replies report each failure, so the trainer can decide
        "log_dir": None if log_dir is None else str(log_dir),
    }
    config = cli_options.config(context, option, given)
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    scorer = load_scorer(function, manager, config, reward_kwargs=reward_kwargs, router_address=router_address)
    service = RewardService(scorer, key=key, concurrency=concurrency, grace_s=grace)
    raise_descriptor_limit()
    with open_listener(host, port, key) as listener:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        print(f"{service.name} is served at {url_of(listener)}/score", flush=True)
        serve_until_signal(service, listener, on_signal=service.stop_from_signal, grace_s=grace + CLOSING_S)
