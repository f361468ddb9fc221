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
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import TypeAdapter, ValidationError

from reward_loop._util.api_keys import has_key
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
from reward_loop.records import records
from reward_loop.scoring.signature import BY_NAME
from reward_loop.types import RewardResult, RewardSample

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 * 2**20
"""The longest body of a request."""

CLOSING_S = 15
"""Seconds, after the grace period, for cancelled samples to end and their answers to be sent."""

_FIELDS = frozenset(field.name for field in fields(RewardSample))

_PARTS = frozenset({"ground_truth", "data_source", *BY_NAME}) - {"uid"}
"""The arguments of a function that come from a request, and may be missing there. Each sample gets a uid."""

_FIELD = {"global_steps": "step"}
"""The fields of requests whose argument has another name."""


class Refused(Exception):
    """A request that is answered with an error status and the message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientDisconnected(Exception):
    """The client has disconnected, so there is nobody to answer."""


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
        self._deadline: asyncio.TimerHandle | None = None
        self._ended: Callable[[], None] | None = None
        """Called when the service stops and no sample is in flight."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        status, content = 200, None
        try:
            content = await self._answer(scope, receive)
        except ClientDisconnected:
            return
        except Refused as error:
            status, content = error.status, {"error": str(error)}
        headers = [(b"content-type", b"application/json")]
        if status in (429, 503):
            headers.append((b"retry-after", b"1"))
        if status == 401:
            headers.append((b"www-authenticate", b'Basic realm="reward-loop serve"'))  # HTTP demands it with a 401
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": encode(content)})

    async def __aenter__(self) -> Self:
        await self._agent.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.stopping = True
        if self._deadline is not None:
            self._deadline.cancel()
        await self._agent.__aexit__(kind, error, trace)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive) -> Any:
        if scope["path"] == "/health":
            if self.stopping:
                raise Refused(503, "the service is stopping")
            return {"status": "ok"}
        self._check_sender(scope["headers"])
        if (scope["method"], scope["path"]) != ("POST", "/score"):
            raise Refused(404, f"no {scope['method']} {scope['path']}: POST samples to /score")
        content = _json(await _body(receive))
        is_many = isinstance(content, dict) and "samples" in content
        if is_many and len(content) > 1:
            other = shorten(next(name for name in content if name != "samples"))
            raise Refused(422, f"unknown field {other} beside samples: each sample has its own fields")
        given = self._samples(content["samples"] if is_many else [content])
        groups = self._members(given)
        order = [index for members in groups for index in members]
        # The agent sets the group: those of another request with the same name are other groups.
        samples = [replace(given[index], group=None, group_size=None) for index in order]
        results = await self._score(samples, [len(members) for members in groups], receive)
        shown = dict(zip(order, map(_shown, samples, results), strict=True))
        return {"results": [shown[index] for index in range(len(given))]} if is_many else shown[0]

    def _samples(self, rows: Any) -> list[RewardSample]:
        """Return the samples of a request, each with a unique name where it has none."""
        if not isinstance(rows, list) or not rows:
            raise Refused(422, "samples must be a list with at least one sample")
        self._requests += 1
        return [self._sample(row, index) for index, row in enumerate(rows)]

    def _sample(self, row: Any, index: int) -> RewardSample:
        if not isinstance(row, dict):
            raise Refused(422, f"sample {index} must be an object with solution_str")
        if unknown := sorted(row.keys() - _FIELDS):
            hint = did_you_mean(unknown[0], _FIELDS)
            raise Refused(422, f"sample {index} has an unknown field {shorten(unknown[0])}{hint}")
        given = row.keys() | ({"response_length"} if "response_ids" in row else set())
        if missing := sorted(name for name in self.requires & _PARTS if _FIELD.get(name, name) not in given):
            why = f"which {self.name} requires: send it, or give the parameter a default"
            raise Refused(422, f"sample {index} has no {_FIELD.get(missing[0], missing[0])}, {why}")
        try:
            uid = f"{self._uids}.{self._requests}.{index}"
            sample = _validator().validate_python({**row, "uid": uid} if row.get("uid") is None else row)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]  # without the value, which may be long
            where = ".".join(map(str, problem["loc"]))
            raise Refused(422, f"sample {index}, {where}: {problem['msg']}") from None
        if sample.response_length is None and sample.response_ids is not None:
            sample = replace(sample, response_length=len(sample.response_ids))
        return sample

    def _check_sender(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        def values(name: bytes) -> bytes:
            return b", ".join(value for key, value in headers if key == name)

        if self._key is not None:
            if not has_key(values(b"authorization"), self._key, basic=True):
                raise Refused(
                    401,
                    "the API key is missing or wrong: send it as a bearer token, or in the URL as "
                    "http://key:KEY@host:port/score",
                )
            return
        # A page in a browser on this machine could spend the budget of a judge.
        host, origin = values(b"host").decode("latin-1"), values(b"origin").decode("latin-1")
        known = is_known_host(host or "localhost", own_names(), any_address=True)
        if not known or is_foreign_origin(origin or None, host):
            raise Refused(403, "requests of web pages are refused: use the IP address, or set --api-key-env")

    def _members(self, samples: Sequence[RewardSample]) -> list[list[int]]:
        """Return the indices of the samples of each group; samples without a group are groups of their own."""
        groups: dict[str | int, list[int]] = {}
        for index, sample in enumerate(samples):
            if sample.group is None and self.needs_groups:
                raise Refused(
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
            raise Refused(422, str(error)) from None
        self._pending.add(pending)
        self.in_flight += len(samples)
        results: list[RewardResult] = []

        async def collect() -> None:
            results.extend(await pending.results())

        try:
            if not await stop_on_disconnect(receive, collect):
                raise ClientDisconnected
        except RewardsCancelledError:
            raise Refused(503, "the service stopped before all samples were scored") from None
        except RewardLoopError as error:  # the policy `raise`, too many failures, or an error of the manager
            logger.warning("%s", error)
            raise Refused(500, str(error)) from error
        finally:
            pending.cancel()  # if this request ended early, its samples would run on
            self._pending.discard(pending)
            self.in_flight -= len(samples)
            self._end_if_idle()
        return results

    def _check_room(self, count: int) -> None:
        if self.stopping:
            raise Refused(503, "the service is stopping")
        if count > self._max_in_flight:
            raise Refused(
                413,
                f"the request has {count} samples, and at most {self._max_in_flight} are accepted at a time: send "
                "fewer in a request, or raise --concurrency",
            )
        if self.in_flight + count > self._max_in_flight:
            raise Refused(
                429,
                f"{self.in_flight} samples are in flight, and at most {self._max_in_flight} are accepted at a time: "
                "send the request again later, or raise --concurrency",
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
        self._deadline = asyncio.get_running_loop().call_later(self._grace_s, self._cancel_all)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._ended is not None and not self.in_flight:
            self._ended()

    def _cancel_all(self) -> None:
        # A copy: a request removes its batch when it ends.
        for pending in list(self._pending):
            pending.cancel()


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise Refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes: send fewer samples in a request")
        more = message.get("more_body", False)
    return b"".join(parts)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None


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
        try:
            serve_until_signal(service, listener, on_signal=service.stop_from_signal, grace_s=grace + CLOSING_S)
        finally:
            if config.log_dir is not None:
                records(config.log_dir).flush()
