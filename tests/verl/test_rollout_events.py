"""The events of rollouts that verl's agent loop worker records, without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from reward_loop.records import Records
from reward_loop.records.events import read_events
from reward_loop.verl.rollout_events import RecordingAgentLoopWorker, _open_records
from reward_loop.verl.separate_async import QueueAgentLoopWorker

pytestmark = pytest.mark.integration  # imports verl

TRAINING = {"validate": False}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose sessions are generated, judged and written by stand-ins of verl's methods.

    `fails` is the stage that fails; `own_score` is a score that the agent loop sets itself."""

    async def run(self: Any, sampling_params: dict, trajectory: dict, **kwargs: Any) -> None:
        if self.fails == "generation":
            raise KeyError("tool")
        output = SimpleNamespace(reward_score=self.own_score)
        await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def write(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        await self._compute_score([output], kwargs=kwargs)

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        self.sent.append(kwargs)
        if self.fails == "judging":
            raise RuntimeError("no judge")
        await asyncio.sleep(0)

    verl = AgentLoopWorkerTQ.__ray_actor_class__
    for name, method in (
        ("_run_agent_loop", run),
        ("_agent_loop_postprocess", write),
        ("_compute_score", compute_score),
    ):
        monkeypatch.setattr(verl, name, method)
    made: Any = object.__new__(RecordingAgentLoopWorker)
    made._records = Records(tmp_path)
    made.reward_loop_worker_handles, made.fails, made.own_score, made.sent = ["the client"], "", None, []
    return made


async def session(worker: Any, number: int = 0, trajectory: dict[str, Any] = TRAINING) -> dict[str, Any]:
    """Run a session, and return its event."""
    try:
        await worker._run_agent_loop({}, trajectory, uid="q", session_id=number, global_steps=3)
    finally:
        assert await asyncio.to_thread(worker._records.flush)
        (event,) = read_events(worker._records.path.parent)
    return event


async def test_a_session_has_its_times_in_their_order(worker: Any) -> None:
    event = await session(worker, 2)
    assert [event[name] for name in ("kind", "uid", "group", "step", "validate")] == ["rollout", "q_2", "q", 3, False]
    assert event["start"] <= event["end"] <= event["scoring"] <= event["scored"]
    assert event["error"] is None


async def test_a_validation_session_is_marked(worker: Any) -> None:
    assert (await session(worker, trajectory={"validate": True}))["validate"] is True


@pytest.mark.parametrize("recorded", [True, False])
async def test_samples_of_a_validation_are_marked_for_the_reward_workers(worker: Any, recorded: bool) -> None:
    if not recorded:
        worker._records = None
    for validate in (True, False):
        await worker._run_agent_loop({}, {"validate": validate}, uid="q", session_id=0, global_steps=3)
    names = {"uid": "q", "session_id": 0, "global_steps": 3}
    assert worker.sent == [{**names, "__validate__": True}, names]


@pytest.mark.parametrize(
    ("fails", "error", "known"),
    [("generation", "KeyError: 'tool'", []), ("judging", "RuntimeError: no judge", ["scoring"])],
)
async def test_a_session_that_fails_has_its_error_and_the_times_so_far(
    worker: Any, fails: str, error: str, known: list[str]
) -> None:
    worker.fails = fails
    with pytest.raises((KeyError, RuntimeError)):
        await session(worker)
    (event,) = read_events(worker._records.path.parent)
    assert event["error"] == error
    assert [name for name in ("scoring", "scored") if event[name] is not None] == known
    assert event["end"] >= event["start"]


@pytest.mark.parametrize(("own_score", "handles"), [(0.5, ["the client"]), (None, None)])
async def test_without_a_reward_worker_no_reward_is_requested(worker: Any, own_score: Any, handles: Any) -> None:
    worker.own_score, worker.reward_loop_worker_handles = own_score, handles
    event = await session(worker)
    assert (event["scoring"], event["scored"]) == (None, None)


async def test_nothing_is_recorded_without_a_folder(worker: Any, tmp_path: Path) -> None:
    worker._records = None
    await worker._run_agent_loop({}, TRAINING, uid="q", session_id=0, global_steps=3)
    assert list(tmp_path.iterdir()) == []
    assert _open_records(OmegaConf.create({"reward_loop": {"log_dir": None}})) is None
    opened = _open_records(OmegaConf.create({"reward_loop": {"log_dir": str(tmp_path)}}))
    assert opened is not None
    assert opened.path.parent == tmp_path


def test_the_workers_of_all_modes_record_rollouts() -> None:
    assert issubclass(QueueAgentLoopWorker, RecordingAgentLoopWorker)


async def test_two_sessions_of_the_same_name_at_the_same_time_are_both_recorded(worker: Any, tmp_path: Path) -> None:
    """A prompt that was sent again may still be generated for the first time."""
    names: dict[str, Any] = {"uid": "q", "session_id": 0, "global_steps": 3}
    await asyncio.gather(*(worker._run_agent_loop({}, TRAINING, **names) for _ in range(2)))
    assert await asyncio.to_thread(worker._records.flush)
    assert [event["scored"] is not None for event in read_events(tmp_path)] == [True, True]


async def test_a_response_that_is_postprocessed_outside_of_a_session_keeps_its_reward(worker: Any) -> None:
    await worker._agent_loop_postprocess(SimpleNamespace(reward_score=None), False, uid="q", session_id=0)
