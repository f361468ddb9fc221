"""verl's agent loop worker that publishes trajectories first, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from reward_loop.verl import agent_loop
from reward_loop.verl.agent_loop import PipelineAgentLoopWorker, _Prompt
from reward_loop.verl.progress import Event

pytestmark = pytest.mark.integration  # it imports verl


def training_worker(**prompts: int) -> Any:
    """A worker with prompts, given as uid and number of sessions."""
    worker: Any = object.__new__(PipelineAgentLoopWorker)
    worker._prompts = {uid: _Prompt(uid, range(sessions)) for uid, sessions in prompts.items()}
    worker._events, worker._has_events = [], asyncio.Event()
    return worker


async def test_unfinished_prompts_are_described() -> None:
    worker = training_worker(a=3, b=2, c=1)
    task: Any = object()
    for uid, generating, judging in [("a", {1, 0}, [2]), ("b", set(), [1, 0]), ("c", set(), [])]:
        worker._prompts[uid].generating = generating
        worker._prompts[uid].judging = dict.fromkeys(judging, task)
    assert await worker.unfinished_prompts() == {
        "a": "sessions [0, 1] are being generated, sessions [2] are being judged",
        "b": "sessions [0, 1] are being judged",
        "c": "its results are being written",
    }


@pytest.mark.parametrize(("published", "events"), [(False, [("failed", "a_1: KeyError: 'tool'")]), (True, [])])
async def test_a_failure_before_publishing_is_an_event(
    published: bool, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("tool")

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_run_agent_loop", fail)
    worker = training_worker(a=2)
    prompt = worker._prompts["a"]
    prompt.generating = {0}
    prompt.unpublished = {0} if published else {0, 1}
    with pytest.raises(KeyError):
        await worker._run_agent_loop({}, {}, uid="a", session_id=1)
    assert worker._events == events
    assert prompt.unpublished == {0}


async def test_the_end_of_generation_is_an_event_before_the_trajectories_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = training_worker(a=2)
    written: list[list[Event]] = []

    async def write(*args: Any, **kwargs: Any) -> None:
        written.append(list(worker._events))

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_agent_loop_postprocess", write)
    monkeypatch.setattr(agent_loop.tq, "async_kv_put", write)
    for session in range(2):
        await worker._agent_loop_postprocess([], False, uid="a", session_id=session)
    # Two trajectories, and the tag of their prompt.
    assert written == [[], [("generated", "a")], [("generated", "a")]]
    assert worker._events == [("generated", "a"), ("published", "a")]


class Output(SimpleNamespace):
    def as_dict(self) -> dict[str, Any]:
        return {"rm_scores": self.reward_score, "extra_fields": dict(self.extra_fields)}


@pytest.fixture
async def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with one session of a prompt, whose judge waits for `reward`, and verl's write of the trajectory.

    `options` are further arguments of verl's call of `_compute_score`."""

    async def write(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        await self._compute_score(outputs, kwargs=kwargs, **self.options)
        self.written.append([one.reward_score for one in outputs])

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        self.calls.append(kwargs)
        assert options == self.options
        outputs[-1].reward_score = await self.reward
        outputs[-1].extra_fields["reward_extra_info"] = {"reward_outcome": "scored"}

    async def put(**kwargs: Any) -> None:
        pass

    verl = AgentLoopWorkerTQ.__ray_actor_class__
    monkeypatch.setattr(verl, "_agent_loop_postprocess", write)
    monkeypatch.setattr(verl, "_compute_score", compute_score)
    monkeypatch.setattr(agent_loop.tq, "async_kv_put", put)
    worker = training_worker(a=1)
    worker.reward_loop_worker_handles = ["the client"]
    worker.written, worker.calls, worker.reward, worker.options = [], [], asyncio.Future(), {}
    return worker


async def test_a_trajectory_is_published_before_its_reward(judged: Any) -> None:
    outputs = [Output(reward_score=None, extra_fields={}), Output(reward_score=None, extra_fields={})]
    session = asyncio.create_task(judged._agent_loop_postprocess(outputs, False, uid="a", session_id=0))
    events: list[Event] = []
    async with asyncio.timeout(30):
        while ("published", "a") not in events:
            events += await judged.next_events()
    assert judged.written == [[None, None]]
    assert await judged.unfinished_prompts() == {"a": "sessions [0] are being judged"}
    judged.reward.set_result(0.5)
    await session
    assert {key: reward["rm_scores"] for key, reward in judged._prompts["a"].rewards.items()} == {
        "a_0_0": 0.5,
        "a_0_1": 0.5,
    }
    events += await judged.next_events()
    assert events == [("generated", "a"), ("judging", "a_0"), ("published", "a"), ("judged", "a_0")]
    assert len(judged.calls) == 1
    assert not judged._prompts["a"].judging


async def test_a_session_whose_judging_fails_is_masked(judged: Any) -> None:
    output = Output(reward_score=None, extra_fields={})
    judged.reward.set_exception(ConnectionError("the client is gone"))
    with pytest.raises(ConnectionError):
        await judged._agent_loop_postprocess(output, False, uid="a", session_id=0)
    info = judged._prompts["a"].rewards["a_0_0"]["extra_fields"]["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
    assert "the client is gone" in info["reward_error"]
    assert judged._events[-1] == ("judged", "a_0")


async def test_a_judge_has_ended_when_the_trajectory_cannot_be_written(
    judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict) -> None:
        try:
            await self.reward
        finally:
            for _ in range(5):  # as if it closed a connection
                await asyncio.sleep(0)
            ended.append(True)

    async def fail(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        await self._compute_score([output], kwargs)
        await asyncio.sleep(0)  # the judge starts
        raise OSError("TransferQueue is gone")

    verl = AgentLoopWorkerTQ.__ray_actor_class__
    monkeypatch.setattr(verl, "_compute_score", compute_score)
    monkeypatch.setattr(verl, "_agent_loop_postprocess", fail)
    output = Output(reward_score=None, extra_fields={})
    with pytest.raises(OSError, match="TransferQueue is gone"):
        await judged._agent_loop_postprocess(output, False, uid="a", session_id=0)
    assert ended == [True]
    assert not judged._prompts["a"].judging
    assert judged._events[-1] == ("judged", "a_0")


@pytest.mark.parametrize(("score", "handles"), [(1.0, ["the client"]), (None, None)])
async def test_a_session_is_not_judged_twice_or_without_reward_workers(judged: Any, score: Any, handles: Any) -> None:
    """The agent loop has set a score; or the trainer sends the whole batch to the reward workers."""
    judged.reward.set_result(0.0)
    judged.reward_loop_worker_handles = handles
    await judged._agent_loop_postprocess(Output(reward_score=score, extra_fields={}), False, uid="a", session_id=0)
    assert judged._events == [("generated", "a"), ("published", "a")]


async def test_a_validation_sample_is_judged_before_it_is_published(judged: Any) -> None:
    judged.reward.set_result(1.0)
    await judged._agent_loop_postprocess(Output(reward_score=None, extra_fields={}), True, uid="v", session_id=0)
    assert judged.written == [[1.0]]
    assert judged.calls[0]["__validate__"] is True
    assert judged._events == []


@pytest.mark.parametrize(("uid", "validate"), [("a", False), ("v", True)])
async def test_verl_may_pass_the_argument_validate(judged: Any, uid: str, validate: bool) -> None:
    """A change to verl that is not released adds this argument, and requires it."""
    judged.reward.set_result(1.0)
    judged.options = {"validate": validate}
    output = Output(reward_score=None, extra_fields={})
    await judged._agent_loop_postprocess(output, validate, uid=uid, session_id=0)
    assert [call["uid"] for call in judged.calls] == [uid]
    assert output.reward_score == 1.0
