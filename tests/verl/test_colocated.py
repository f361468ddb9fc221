"""Two reward models on the trainer's devices, in a real run of verl's trainer on a CPU: who is awake when."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from verl.single_controller.ray import ResourcePoolManager

from reward_loop.client import chat_complete
from reward_loop.client import http as client
from reward_loop.config import RewardModelConfig, parse
from reward_loop.errors import ServerError
from reward_loop.router.config import BackendConfig
from reward_loop.serving import serve_reward_model
from reward_loop.verl import colocated
from reward_loop.verl.reward_model import MOST_COLOCATED
from reward_loop.verl.workers import beside
from tests.servers import CHAT, listed, model_server, post, serving, until
from tests.verl.checks import signature, texts
from tests.verl.configs import settled
from tests.verl.runs import Run, agent_loop, train

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path, tiny_discriminative_model: Path) -> Run:
    """Two steps with a validation before and after them, several mini-batches a step."""
    directory = tmp_path_factory.mktemp("colocated")
    return train(
        directory,
        tiny_generative_model,
        "trainer.v1.trainer_mode=reward_pipeline",
        "trainer.v1.reward_pipeline.one_step_off_policy=False",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "reward_model.enable=True",
        f"reward_model.model.path={tiny_discriminative_model}",
        "+reward_model.server.placement=colocated",
        "+reward_model.server.served_model_name=first",
        f"+reward_model.server.models.second.model_path={tiny_generative_model}",
        *agent_loop("timed"),
        function="watched",
    )


def test_every_sample_is_scored_exactly_once(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    seen = [row for step in (1, 2) for row in run.rollouts(step)]
    assert len(seen) == 2 * 8 * 4
    assert texts([call for call in run.calls if call["split"] == "train"]) == texts(seen)
    validated = [row for step in (0, 2) for row in run.validation(step)]
    assert signature([call for call in run.calls if call["split"] == "val"]) == signature(validated)


def test_only_the_model_that_is_asked_is_awake(run: Run) -> None:
    # An answer is followed by the end of a turn only when the others have been asked, too: the answer of the last one
    # may be read when its model falls asleep.
    seen = [awake for call in run.calls for awake in call["awake"]]
    assert all(awake in (["first"], ["second"], []) for awake in seen)
    assert sum(call["awake"] == [["first"], ["second"]] for call in run.calls) > len(run.calls) / 2


def test_nothing_is_generated_while_a_reward_model_is_awake(run: Run) -> None:
    assert len(run.generations) == 2 * 8 * 4 + 2 * 8
    assert all(generation["model_slept"] for generation in run.generations)


def test_no_judging_is_hidden(run: Run) -> None:
    for step in (1, 2):
        metrics = run.steps[step]
        assert metrics["reward_loop/scored"] == 8 * 4
        assert 0 < metrics["reward_loop/model_wake_s"] < metrics["reward_pipeline/waiting_for_rewards_s"]
        assert 0 < metrics["reward_loop/model_sleep_s"] < metrics["reward_pipeline/waiting_for_rewards_s"]
        assert metrics["reward_pipeline/hidden_share"] == pytest.approx(0, abs=1e-3)
        assert metrics["reward_pipeline/off_policy_steps"] == 0
        assert metrics["actor/grad_norm"] > 0
        wakes = [metrics[f"reward_loop/model_wakes/{name}"] for name in ("first", "second")]
        # 32 functions ask one and then the other: with a turn for each function, there would be 32.
        assert metrics["reward_loop/model_wakes"] == sum(wakes)
        assert all(1 <= number <= 4 for number in wakes)
        for name in ("first", "second"):
            assert 0 < metrics[f"reward_loop/model_wake_s/{name}"] < metrics["reward_loop/model_wake_s"]


def test_the_router_has_servers_only_while_they_are_awake_also_if_it_was_restarted_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "http://127.0.0.1:9"
    events: list[str] = []

    def servers() -> list[str]:
        with urllib.request.urlopen(f"http://{router}/workers") as response:
            return [server["url"] for server in json.loads(response.read())]

    replicas = SimpleNamespace(
        server_addresses=["127.0.0.1:9"],
        wake_up=lambda: events.append("wake up"),
        sleep=lambda: events.append(f"sleep, router has {servers()}"),
    )
    monkeypatch.setattr(colocated, "_Replicas", lambda options, pool: replicas)
    # With an address that the user has chosen, Ray is not asked for tunnels to other nodes.
    served = RewardModelConfig(
        engine="transformers", model_path="model", kind="generative", host="127.0.0.2", placement="colocated"
    )
    with colocated.ColocatedRewardModels(settled(), served, workers=1) as models:
        router = models.start(pool=None).address
        assert servers() == []
        # A router that was restarted has the servers already.
        body = BackendConfig(url=url, kind="generative", engine="transformers").model_dump_json().encode()
        request = urllib.request.Request(
            f"http://{router}/workers", body, {"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request).close()
        for _ in range(2):
            with models.awake() as turns:
                assert turns is None
                assert servers() == [url]
        assert servers() == []
    assert events == ["wake up", "sleep, router has []"] * 2


def test_verl_has_room_for_the_models() -> None:
    assert ResourcePoolManager.max_colocate_count == 1 + MOST_COLOCATED


@contextlib.asynccontextmanager
async def two_models(
    monkeypatch: pytest.MonkeyPatch, fails: str = "", replies: tuple[Any, Any] = (model_server("a"), model_server("b"))
) -> AsyncIterator[tuple[colocated.ColocatedRewardModels, list[str], str]]:
    """The models ``a`` and ``b``, the changes of their replicas, and the URL of the router."""
    changes: list[str] = []

    def change(what: str) -> None:
        if what == fails:
            raise RuntimeError("the actor died")
        changes.append(what)

    async with serving(replies[0]) as a, serving(replies[1]) as b, asyncio.timeout(120):
        addresses = {name: url.removeprefix("http://") for name, url in (("a", a), ("b", b))}

        def replicas(options: Any, pool: Any) -> SimpleNamespace:
            name = options.model_path or "a"  # the first one's is verl's option
            return SimpleNamespace(
                server_addresses=[addresses[name]],
                wake_up=functools.partial(change, f"{name} wakes up"),
                sleep=functools.partial(change, f"{name} sleeps"),
            )

        monkeypatch.setattr(colocated, "_Replicas", replicas)
        named = {"model_path": "b", "engine": "transformers", "kind": "generative"}
        options = {"model_path": "a", "kind": "generative", "host": "127.0.0.2", "placement": "colocated"}
        served = parse(RewardModelConfig, {**options, "models": {"b": named}}, "reward_model.server")
        with colocated.ColocatedRewardModels(settled(), served, workers=1) as models:
            router = await asyncio.to_thread(models.start, None)
            yield models, changes, f"http://{router.address}"


async def ask(url: str, *names: str) -> list[bytes]:
    answers = [await post(url, CHAT, json.dumps({"model": name}).encode()) for name in names]
    return [body for _, body in answers]


async def test_all_models_sleep_when_judging_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics: dict[str, float] = {}
    async with two_models(monkeypatch) as (models, changes, url):
        for _ in range(2):
            changes.clear()
            with models.awake(metrics) as turns:
                assert await beside(ask(url, "a", "b", "a"), turns) == [b"a", b"b", b"a"]
            assert changes == [f"{name} {what}" for name in "aba" for what in ("wakes up", "sleeps")]
    counts = {name: value for name, value in metrics.items() if "wakes" in name}
    assert counts == {"reward_loop/model_wakes": 6, "reward_loop/model_wakes/a": 4, "reward_loop/model_wakes/b": 2}


class Judge:
    """A server of a model that answers with its name, when its gate is open; a closed connection ends a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0
        self.open = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await receive()
            self.asked += 1
            waits = [asyncio.create_task(self.open.wait()), asyncio.create_task(receive())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not self.open.is_set():
                return
        answer = {
            "choices": [{"message": {"content": self.name}, "finish_reason": "stop"}],
            "data": [{"id": self.name}],
        }
        await model_server(json.dumps(answer))(scope, _nothing, send)


async def _nothing() -> None:
    pass


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models for which requests wait, or have waited."""
    until_awake, seen = client._until_awake, []

    async def recorded(url: str, headers: Any, model: Any, waited_s: float) -> None:
        seen.append(model)
        await until_awake(url, headers, model, waited_s)

    monkeypatch.setattr(client, "_until_awake", recorded)
    return seen


def asking(url: str, model: str, number: int = 3) -> list[asyncio.Task[Any]]:
    address = url.removeprefix("http://")
    return [asyncio.create_task(chat_complete(address, str(i), model=model)) for i in range(number)]


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whose processes include the router."""
    started: list[Any] = []

    @contextlib.contextmanager
    def captured(*args: Any, **options: Any) -> Iterator[Any]:
        with serve_reward_model(*args, **options) as manager:
            started.append(manager)
            yield manager

    monkeypatch.setattr(colocated, "serve_reward_model", captured)
    return started


async def test_a_router_that_is_killed_while_calls_wait_for_their_turn_loses_none(
    monkeypatch: pytest.MonkeyPatch, waits: list[str], managers: list[Any]
) -> None:
    later = [0.0]
    clock = vars(time) | {"monotonic": lambda: time.monotonic() + later[0]}
    monkeypatch.setattr(colocated, "time", SimpleNamespace(**clock))
    a, b = Judge("a"), Judge("b")
    async with two_models(monkeypatch, replies=(a, b)) as (models, changes, url):
        changes.clear()
        with models.awake() as turns:
            assert turns is not None
            owner = asyncio.create_task(turns())
            calls = asking(url, "a")
            await until(lambda: a.asked == 3)
            calls += asking(url, "b")
            await until(lambda: waits.count("b") == 3)
            later[0] = 10_000  # the turn has lasted longer than the router may be away
            os.kill(managers[0].pids()["router"], signal.SIGKILL)
            a.open.set()
            b.open.set()
            assert [reply.text for reply in await asyncio.gather(*calls)] == list("aaabbb")
            # Another one is killed while it waits for the requests of a model that must sleep.
            b.open.clear()
            calls = asking(url, "b")
            await until(lambda: b.asked == 6)
            owner.cancel()
            async with aiohttp.ClientSession(url) as session:
                while await listed(session):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            os.kill(managers[0].pids()["router"], signal.SIGKILL)
            assert isinstance(*await asyncio.gather(owner, return_exceptions=True), asyncio.CancelledError)
            assert changes == [f"{name} {what}" for name in "ab" for what in ("wakes up", "sleeps")]
        b.open.set()
        with models.awake() as turns:
            replies = await beside(asyncio.wait_for(asyncio.gather(*calls), 60), turns)
        assert [reply.text for reply in replies] == list("bbb")


@pytest.mark.parametrize(
    ("sends", "error"),
    [
        ("", "SocketTimeoutError"),
        # It begins to answer and dies, again and again.
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n \r\n", "ClientPayloadError"),
    ],
)
async def test_a_router_that_never_completes_an_answer_ends_judging(
    sends: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated, "SILENT_S", 0.05)
    monkeypatch.setattr(colocated, "_ROUTER_BACK_WITHIN_S", 0.1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if sends:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sends.encode())
        else:
            await reader.read()
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(serve, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        model = SimpleNamespace(router=f"{host}:{port}", remove_servers=lambda: None)
        models = colocated.ColocatedRewardModels(settled(), RewardModelConfig(model_path="a"), workers=1)
        monkeypatch.setattr(models, "_models", {"a": model, "b": model})
        with models.awake() as turns:
            assert turns is not None
            with pytest.raises(ServerError, match=rf"the router .* is away: {error}"):
                await turns()


async def test_calls_that_wait_when_training_resumes_have_their_turn_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch, waits: list[str]
) -> None:
    a, b = Judge("a"), Judge("b")
    b.open.set()
    async with two_models(monkeypatch, replies=(a, b)) as (models, changes, url):
        changes.clear()
        with models.awake() as turns:
            assert turns is not None
            owner = asyncio.create_task(turns())
            first = asking(url, "a")
            await until(lambda: a.asked == 3)
            second = asking(url, "b")
            await until(lambda: waits.count("b") == 3)
            owner.cancel()  # as at the end of a step; the calls in flight end before the model sleeps
            a.open.set()
            await asyncio.gather(owner, return_exceptions=True)
        assert changes == ["a wakes up", "a sleeps"]
        assert [reply.text for reply in await asyncio.gather(*first)] == list("aaa")
        late = asking(url, "a")
        await until(lambda: waits.count("a") >= 6)
        assert not any(call.done() for call in (*second, *late))
        with models.awake() as turns:
            replies = await beside(asyncio.wait_for(asyncio.gather(*second, *late), 60), turns)
    assert [reply.text for reply in replies] == list("bbbaaa")
    # Those that have waited since the step before come first.
    assert changes[2:] == [f"{name} {what}" for name in "ba" for what in ("wakes up", "sleeps")]


@pytest.mark.parametrize(("fails", "what"), [("b wakes up", "wake up"), ("a sleeps", "fall asleep")])
async def test_judging_ends_with_the_error_of_a_model_that_cannot_change(
    fails: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_models(monkeypatch, fails) as (models, _, url):
        with (
            models.awake() as turns,
            pytest.raises(ServerError, match=f"'{fails[0]}' did not {what}: .*the actor died"),
        ):
            await beside(ask(url, "a", "b"), turns)
