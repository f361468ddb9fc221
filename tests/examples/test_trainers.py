"""The examples for other trainers: called as their trainers call them, with rewards from a service."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from pydantic import BaseModel, Field

from reward_loop.adapters.serve import RewardService
from reward_loop.managers.scorer import Scorer
from tests.adapters.services import Centred, ranks, scorer
from tests.support.gsm8k import ROOT
from tests.support.servers import serving

Load = Callable[[str], Any]


def compute_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any] | None:
    """1 for the ground truth, otherwise 0; `none` has no score, `fail` raises."""
    if solution_str == "none":
        return None
    if solution_str == "fail":
        raise ValueError("the judge is broken")
    return {"score": float(solution_str == ground_truth), "words": len(solution_str.split()), "seen": repr(extra_info)}


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, made: Scorer | None = None, **options: Any) -> AsyncIterator[Load]:
    """Serve a function; yields a function that loads an example, whose client belongs to this event loop."""

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "trainers" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    service = RewardService(made or scorer(compute_score), **options)
    async with service, serving(service) as url:
        monkeypatch.setenv("REWARD_URL", f"{url}/score")
        yield load


# --- slime and miles


@dataclass
class Sample:
    """The fields of ``Sample`` that slime (August 2026) and miles (August 2026) have in common."""

    response: str = ""
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = "2+2="
    tokens: list[int] = field(default_factory=lambda: [7, 8, 19, 2, 2])
    response_length: int = 3
    label: str | None = "4"
    reward: float | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Any = field(default_factory=lambda: SimpleNamespace(value="truncated"))

    def get_reward_value(self, args: Any) -> Any:
        return self.reward


ALONE, GROUPED = SimpleNamespace(group_rm=False), SimpleNamespace(group_rm=True)


async def test_slime_gets_rewards_and_removes_samples_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as load:
        slime = load("slime_reward")
        samples = [Sample(text, metadata={"level": "easy"}) for text in ("4", "5", "fail", "none")]
        assert [await slime.custom_rm(ALONE, one, evaluation=False) for one in samples] == [1.0, 0.0, 0.0, 0.0]
        assert [one.remove_sample for one in samples] == [False, False, True, True]
        assert samples[0].metadata["reward_loop"]["reward_extra_info"]["seen"] == "{'level': 'easy'}"
        assert samples[0].metadata["reward_loop"]["components"] == {"words": 1.0}
        assert "the judge is broken" in samples[2].metadata["reward_loop"]["error"]

        samples[2].response = "4"  # scored again
        samples[0].metadata.clear()
        samples[0].remove_sample = True  # by someone else
        assert [await slime.custom_rm(ALONE, samples[i]) for i in (2, 0)] == [1.0, 1.0]
        assert [samples[i].remove_sample for i in (2, 0)] == [False, True]


@pytest.mark.parametrize("trainer", ["slime", "verifiers"])
async def test_a_full_service_is_asked_again(monkeypatch: pytest.MonkeyPatch, trainer: str) -> None:
    async def slow(solution_str: str) -> float:
        await asyncio.sleep(0.2)
        return float(solution_str)

    def ask(module: Any) -> Any:
        if trainer == "slime":
            return module.custom_rm(ALONE, [Sample("1"), Sample("1")])
        trace = SimpleNamespace(last_reply="1", id=None, num_output_tokens=1, record_metrics=lambda numbers: None)
        task = SimpleNamespace(model_dump=lambda mode: {"answer": "1", "prompt": "?"})
        return module.reward(task, trace)

    async with served(monkeypatch, scorer(slow), max_in_flight=2 if trainer == "slime" else 1) as load:
        module = load(f"{trainer}_reward")
        monkeypatch.setattr(module, "PAUSE_S", 0.05)
        found = await asyncio.gather(*(ask(module) for _ in range(3)))
    assert found == [[1.0, 1.0] if trainer == "slime" else 1.0] * 3


@pytest.mark.parametrize(
    ("function", "manager", "rewards"),
    [(ranks, "group", [[1.0, 0.0, 2.0], [0.0, 2.0, 1.0]]), (Centred, "naive", [[0, -1, 1], [-4 / 3, 5 / 3, -1 / 3]])],
)
async def test_slime_compares_groups_with_group_rm_only(
    function: Any, manager: str, rewards: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch, scorer(function, manager)) as load:
        slime = load("slime_reward")
        # Both groups have the same index, as a group of training and one of evaluation may have.
        texts = (("aa", "a", "aaa"), ("b", "bbbb", "bb"))
        groups = [[Sample(text, group_index=0) for text in group] for group in texts]
        scored = await asyncio.gather(*(slime.custom_rm(GROUPED, group) for group in groups))
        assert scored == [pytest.approx(group) for group in rewards]
        with pytest.raises(RuntimeError, match="compares the samples of a group"):
            await slime.custom_rm(ALONE, Sample("a"))


def normalisation(**values: Any) -> SimpleNamespace:
    defaults = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": False}
    return SimpleNamespace(**{**defaults, **values})


def rewarded(*groups: list[float | None]) -> list[Sample]:
    return [
        Sample(group_index=i, index=10 * i + j, reward=reward, remove_sample=reward is None)
        for i, group in enumerate(groups)
        for j, reward in enumerate(group)
    ]


@pytest.fixture
def normalise() -> Any:
    from examples.trainers import slime_normalise

    return slime_normalise.normalise


def test_a_removed_sample_also_without_reward_is_not_part_of_the_baseline(normalise: Any) -> None:
    samples = rewarded([1.0, 0.5, None], [1.0, 1.0, 1.0], [None, None, 1.0], [None, None, None])
    samples[2].reward = 0.0  # as `custom_rm` sets it; the others were removed before their rewards
    raw, normalised = normalise(normalisation(), samples)
    assert raw == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert normalised == [0.25, -0.25, 0.0, *[0.0] * 9]
    assert normalise(normalisation(advantage_estimator="ppo"), samples) == (raw, raw)


@pytest.mark.parametrize(("estimator", "divided"), [("grpo", True), ("reinforce_plus_plus_baseline", False)])
def test_complete_groups_are_normalised_as_by_slime(normalise: Any, estimator: str, divided: bool) -> None:
    groups = [1.0, 0.5, 0.0, 0.0], [0.3, 0.2, 1.0, 1.0]
    expected = [(one - fmean(group)) / (stdev(group) + 1e-6 if divided else 1) for group in groups for one in group]
    args = normalisation(advantage_estimator=estimator, grpo_std_normalization=True)
    assert normalise(args, rewarded(*groups))[1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("wrong", [{"rollout_id": 1}, {"group_index": None}], ids=str)
def test_normalisation_needs_one_sample_for_each_rollout_and_its_group(normalise: Any, wrong: dict[str, Any]) -> None:
    samples = rewarded([1.0, 0.5])
    for each in samples:
        each.__dict__.update(wrong)
    with pytest.raises(ValueError, match="leave out this option"):
        normalise(normalisation(), samples)


# --- ms-swift


@pytest.fixture
def orms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of rewards of a module ``swift.rewards``, whose base class is that of ms-swift 4.6."""

    class AsyncORM:
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            self.args = args

    rewards = ModuleType("swift.rewards")
    rewards.AsyncORM, rewards.orms = AsyncORM, {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.rewards", rewards)
    return rewards.orms  # type: ignore[attr-defined, no-any-return]


def columns(count: int, **own: Any) -> dict[str, Any]:
    """The columns that ms-swift 4.6 passes, and those of the data set."""
    return {
        "trainer_state": SimpleNamespace(global_step=3),
        "messages": [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "?"}]] * count,
        "prompt_id": [f"prompt_{i % 2}" for i in range(count)],
        "request_id": [f"chatcmpl-{i}" for i in range(count)],
        "finish_reason": ["stop"] * count,
        "response_token_ids": [[[1, 2]]] * count,
        "rollout_infos": [{}] * count,
        "solution": ["4"] * count,
        **own,
    }


async def test_swift_gets_none_for_completions_without_a_score(
    monkeypatch: pytest.MonkeyPatch, orms: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def with_step(solution_str: str, ground_truth: str, extra_info: Any, global_steps: int, prompt: Any) -> Any:
        seen.append((sorted(extra_info), global_steps, prompt))
        return compute_score(solution_str, ground_truth, extra_info)

    async with served(monkeypatch, scorer(with_step)) as load:
        load("swift_plugin")
        reward = orms["reward_loop"](args=SimpleNamespace(num_generations=2))
        # ms-swift calls asyncio.run for each batch, if this holds.
        assert asyncio.iscoroutinefunction(reward.__call__)
        assert await reward(["none", "4", "fail", "5"], **columns(4)) == [None, 1.0, None, 0.0]
    assert seen[0] == (["finish_reason", "solution"], 4, [{"role": "user", "content": "2+2?"}])


async def test_swift_compares_whole_groups_only(monkeypatch: pytest.MonkeyPatch, orms: dict[str, Any]) -> None:
    async with served(monkeypatch, scorer(Centred)) as load:
        load("swift_plugin")
        args = SimpleNamespace(num_generations=4, num_generations_eval=2)
        reward = orms["reward_loop"](args=args)
        # Columns 0 and 2 have one prompt, 1 and 3 the other. All groups of an evaluation have this size.
        assert await reward(["a", "b", "aaa", "bbbbb"], **columns(4)) == [-1, -2, 1, 2]
        for prompts in ("aaabbb", "aaaabb", "aaaaaabb"):
            given = columns(len(prompts), prompt_id=list(prompts))
            with pytest.raises(RuntimeError, match="compares the samples of a group"):
                await reward(["a"] * len(prompts), **given)


# --- verifiers


class TaskData(BaseModel):
    idx: int | None = None
    prompt: str | None = "2+2?"
    answer: str = "4"


class Trace(BaseModel):
    id: str = "ab12"
    last_reply: str = ""
    num_output_tokens: int = 3
    metrics: dict[str, float] = {}

    def record_metrics(self, values: dict[str, float]) -> None:
        self.metrics |= values


async def test_a_trace_of_verifiers_gets_its_reward_and_metrics_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as load:
        reward = load("verifiers_reward").reward
        trace = Trace(last_reply="4")
        assert await reward(TaskData(), trace) == 1.0
        assert trace.metrics == {"words": 1.0}
        assert await reward(TaskData(answer="5"), Trace(last_reply="4")) == 0.0
        for reply, message in (("none", "gave no score"), ("fail", "sample ab12: .*the judge is broken")):
            with pytest.raises(RuntimeError, match=message):
                await reward(TaskData(), Trace(last_reply=reply))


# --- OpenRLHF and LLaMA-Factory


def openrlhf(*responses: str, **fields: Any) -> dict[str, Any]:
    return {
        "query": [f"<user>2+2<assistant>{response}" for response in responses],
        "prompts": ["<user>2+2<assistant>"] * len(responses),
        "labels": ["4"] * len(responses),
        **fields,
    }


async def test_openrlhf_gets_numbers_and_the_same_keys_in_every_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_keys(solution_str: str) -> dict[str, Any]:
        return {"score": 1, solution_str: 2, "text": "x"}

    async with served(monkeypatch, scorer(with_keys)) as load:
        module = load("rewards_server")
        monkeypatch.setattr(module, "LOGGED", ("a", "b"))
        transport = httpx.ASGITransport(module.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            replies = [
                (await client.post("/openrlhf", json=openrlhf(text))).json() for text in ("a", "b<|im_end|>\n", "c")
            ]
            empty = (await client.post("/openrlhf", json=openrlhf())).json()
    nan = pytest.approx(math.nan, nan_ok=True)
    assert [reply["extra_logs"] for reply in replies] == [
        {"a": [2], "b": [nan]},
        {"a": [nan], "b": [2]},
        {"a": [nan], "b": [nan]},
    ]
    assert [(reply["rewards"], reply["scores"]) for reply in replies] == [([1.0], [1.0])] * 3
    assert empty == {"rewards": [], "scores": [], "extra_logs": {"a": [], "b": []}}


async def test_openrlhf_gets_an_error_for_a_sample_without_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as load:
        transport = httpx.ASGITransport(load("rewards_server").app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            scored = await client.post("/openrlhf", json=openrlhf("4", "5"))
            failed = await client.post("/openrlhf", json=openrlhf("4", "fail"))
            cut = await client.post("/openrlhf", json=openrlhf("4", prompts=["other"]))
    assert scored.json()["rewards"] == [1.0, 0.0]
    assert (failed.status_code, "the judge is broken" in failed.text) == (500, True)
    assert (cut.status_code, "does not begin with its prompt" in cut.text) == (422, True)


async def test_llamafactory_gets_scores_with_the_key_in_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        served(monkeypatch, scorer(lambda solution_str: len(solution_str)), key="secret") as load,
        serving(load("rewards_server").app) as url,
    ):

        def scores_of(server: str) -> requests.Response:  # as its client asks
            return requests.post(
                f"{server}/llamafactory", json={"model": "model", "messages": ["a", "bcd"]}, timeout=60
            )

        answer = await asyncio.to_thread(scores_of, url.replace("http://", "http://reward:secret@"))
        refused = await asyncio.to_thread(scores_of, url)
    assert answer.json() == {"scores": [1.0, 3.0]}
    assert refused.status_code == 401


# --- NeMo-Gym


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module ``nemo_gym`` with the classes of August 2026 that a resources server needs."""

    class BaseVerifyRequest(BaseModel):
        responses_create_params: dict[str, Any]
        response: dict[str, Any]
        capture_rollout_id: str | None = Field(default=None, alias="_ng_rollout_id", exclude=True)

    class BaseVerifyResponse(BaseVerifyRequest):
        reward: float
        mask_sample: bool = False
        failure_kind: str | None = None
        failure_reason: str | None = None

    server = ModuleType("nemo_gym.base_resources_server")
    server.__dict__.update(
        BaseVerifyRequest=BaseVerifyRequest,
        BaseVerifyResponse=BaseVerifyResponse,
        BaseResourcesServerConfig=object,
        SimpleResourcesServer=object,
    )
    package = ModuleType("nemo_gym")
    package.base_resources_server = server  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nemo_gym", package)
    monkeypatch.setitem(sys.modules, "nemo_gym.base_resources_server", server)


def rollout(text: str = "4", **task: Any) -> dict[str, Any]:
    """Return what a simple agent of NeMo-Gym sends: the task, with the response of the model in OpenAI's format."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "2+2"}], "temperature": 1.0},
        "response": {"id": "resp_1", "object": "response", "model": "policy", "output": [message], "tools": []},
        **task,
    }


@pytest.mark.usefixtures("gym")
async def test_nemo_gym_gets_masked_samples_and_parts_only_if_they_sum_to_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_parts(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        if solution_str in ("none", "fail"):
            return compute_score(solution_str, ground_truth, extra_info)
        assert (ground_truth, extra_info["level"]) == ("4", 2)
        return {"score": 1.0, "form": 0.2, "truth": 0.8 if solution_str == "firstsecond" else 0.7}

    task = rollout("first", expected_answer="4", level=2)
    tool = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"}
    said = [{"type": "message", "role": role, "content": "second"} for role in ("user", "assistant")]
    task["response"]["output"] += [tool, *said]
    async with served(monkeypatch, scorer(in_parts)) as load:
        module = load("nemo_gym_server")
        server = module.RewardLoopServer()

        async def verify(body: dict[str, Any]) -> dict[str, Any]:
            return (await server.verify(module.VerifyRequest(**body))).model_dump()  # type: ignore[no-any-return]

        whole = await verify(task)
        other = await verify(rollout("4", ground_truth="4", level=2))
        failed = await verify(rollout("fail", expected_answer="4"))
        unscored = await verify(rollout("none", expected_answer="4"))
    assert whole.items() >= (task | {"reward": 1.0, "mask_sample": False, "failure_kind": None}).items()
    assert whole["reward_components"] == {"form": 0.2, "truth": 0.8}
    assert "reward_components" not in other | failed | unscored
    assert (failed["mask_sample"], failed["failure_kind"]) == (True, "verifier_error")
    assert "the judge is broken" in failed["failure_reason"]
    assert (unscored["mask_sample"], unscored["failure_kind"]) == (True, "reward_loop:unscored")
