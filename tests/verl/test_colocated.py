"""A reward model on the trainer's devices, in a real run of verl's trainer on a CPU: who is awake when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ServerError
from reward_loop.router.config import BackendConfig
from reward_loop.testing import FakeJudge
from reward_loop.verl.run import services
from tests.verl.checks import signature, texts
from tests.verl.configs import settled
from tests.verl.runs import Run, agent_loop, train

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path, tiny_discriminative_model: Path) -> Run:
    """A step with a validation before and after it, and several mini-batches."""
    directory = tmp_path_factory.mktemp("colocated")
    return train(
        directory,
        tiny_generative_model,
        "trainer.v1.trainer_mode=reward_pipeline",
        "trainer.v1.reward_pipeline.one_step_off_policy=False",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "reward_model.enable=True",
        f"reward_model.model.path={tiny_discriminative_model}",
        "+reward_model.server.placement=colocated",
        *agent_loop("timed"),
        function="watched",
    )


def test_every_sample_is_scored_exactly_once(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    seen = run.rollouts(1)
    assert len(seen) == 8 * 4
    assert texts([call for call in run.calls if call["split"] == "train"]) == texts(seen)
    validated = [row for step in (0, 1) for row in run.validation(step)]
    assert signature([call for call in run.calls if call["split"] == "val"]) == signature(validated)


def test_only_the_reward_model_is_awake_while_it_judges(run: Run) -> None:
    assert all(call["awake"] == ["reward"] for call in run.calls)


def test_nothing_is_generated_while_a_reward_model_is_awake(run: Run) -> None:
    assert len(run.generations) == 8 * 4 + 2 * 8
    assert all(generation["model_slept"] for generation in run.generations)


def test_no_judging_is_hidden(run: Run) -> None:
    metrics = run.steps[1]
    assert metrics["reward_loop/scored"] == 8 * 4
    assert 0 < metrics["reward_loop/model_wake_s"] < metrics["reward_pipeline/waiting_for_rewards_s"]
    assert 0 < metrics["reward_loop/model_sleep_s"] < metrics["reward_pipeline/waiting_for_rewards_s"]
    assert metrics["reward_pipeline/hidden_share"] == pytest.approx(0, abs=1e-3)
    assert metrics["reward_pipeline/off_policy_steps"] == 0
    assert metrics["actor/grad_norm"] > 0


@contextmanager
def models(monkeypatch: pytest.MonkeyPatch, address: str, *, fails: str = "") -> Iterator[tuple[Any, list[str], str]]:
    """A reward model whose server is at an address; what its replicas did, and what the router had; the router."""
    events: list[str] = []

    def do(what: str) -> None:
        if what == fails:
            raise RuntimeError("the actor died")
        events.append(f"{what}: the router has {servers(router)}")

    replicas = SimpleNamespace(server_addresses=[address], wake_up=lambda: do("wake up"), sleep=lambda: do("sleep"))
    monkeypatch.setattr(services, "_Replicas", lambda options, pool: replicas)
    monkeypatch.setattr(services, "reachable", lambda model: (model, []))  # Ray is not running
    served = RewardModelConfig(engine="transformers", model_path="model", kind="generative", placement="colocated")
    with ExitStack() as stack:
        model = services.ColocatedRewardModel(settled(), served, stack)
        router = model.start(pool=None)
        yield model, events, router


def servers(router: str) -> list[str]:
    return [server["url"] for server in httpx.get(f"http://{router}/workers", timeout=60).json()]


def test_the_router_has_the_servers_only_while_they_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:9"
    metrics: dict[str, float] = {}
    with models(monkeypatch, "127.0.0.1:9") as (model, events, router):
        assert servers(router) == []
        # A router that was restarted has the servers already.
        server = BackendConfig(url=url, kind="generative").model_dump(mode="json")
        httpx.post(f"http://{router}/workers", json=server, timeout=60).raise_for_status()
        for _ in range(2):
            events.clear()
            with model.awake(metrics):
                assert servers(router) == [url]
            assert events[-1] == "sleep: the router has []"
        assert servers(router) == []
    assert events == ["wake up: the router has []", "sleep: the router has []"]
    assert min(metrics["reward_loop/model_wake_s"], metrics["reward_loop/model_sleep_s"]) > 0


def test_the_model_sleeps_only_after_the_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang dies if it must sleep while it computes."""
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    replies: list[str] = []

    def ask(router: str) -> None:
        replies.append(httpx.post(f"http://{router}/v1/chat/completions", json=body, timeout=60).text)

    with FakeJudge("8", latency=(0.5, 0.5)) as judge, models(monkeypatch, judge.address) as (model, events, router):
        with model.awake():
            late = threading.Thread(target=ask, args=(router,))
            late.start()
            while not judge.requests:
                time.sleep(0.01)
        assert judge.requests[0].ended.is_set()
        assert events[-1] == "sleep: the router has []"
        late.join(30)
    assert '"8"' in replies[0]


@pytest.mark.parametrize("what", ["wake up", "fall asleep"])
def test_judging_ends_with_the_error_of_a_model_that_cannot_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "sleep" if what == "fall asleep" else what
    with (
        models(monkeypatch, "127.0.0.1:9", fails=fails) as (model, _, _),
        pytest.raises(ServerError, match=f"the reward model did not {what}: .*the actor died"),
        model.awake(),
    ):
        pass
