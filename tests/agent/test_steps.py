"""Steps, phases and waits of an own trainer, read as the viewer reads those of a verl run."""

import asyncio

import pytest

from reward_loop import BlockingRewardAgent, ConfigError, NaiveRewardLoopManager, RewardAgent, RewardLoopError
from reward_loop import RewardSample as Sample
from reward_loop.agent import agent as module
from reward_loop.index.index import open_index
from reward_loop.index.phases import StepTimes
from reward_loop.records.reader import RecordsReader
from reward_loop.records.trainer_events import read_events
from reward_loop.view.timeline import timeline
from tests.agent.judges import Gate, naive, within


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("reward_loop.agent.pending.time", clock)
    return clock


def recording(folder, function):
    return NaiveRewardLoopManager({"log_dir": str(folder)}, compute_score=function)


async def test_the_hidden_share_is_that_of_the_time_without_waiting(tmp_path, clock):
    gate = Gate()
    async with RewardAgent(recording(tmp_path, gate)) as agent:
        with agent.step(3):
            pending = agent.submit([Sample(str(n), step=3) for n in range(2)], group_size=2)  # at 1000 s
            with agent.phase("update"):
                await gate.called(2)
                clock.now += 6
            waiting = asyncio.create_task(pending.all())
            await asyncio.sleep(0)  # the wait begins at 1006 s
            clock.now += 2
            gate.let(0, 1)
            await within(waiting)
            assert await pending  # no wait: the rewards are there
            clock.now += 1
    (step,) = StepTimes(tmp_path).steps().items()
    phases = {"update": 6, "wait_reward": 2, "other": 1}
    assert step == (3, {"phases": phases, "waiting_s": 2, "pending_s": 8, "hidden_share": 1 - 2 / 8})


async def test_events_are_those_of_the_recorded_samples_with_and_without_uid(tmp_path):
    async with RewardAgent(recording(tmp_path, lambda solution_str: float(solution_str))) as agent:
        with agent.step(1):
            pending = agent.submit([Sample("1"), Sample("2"), Sample("3", uid="mine", group="g")], groups=[2, 1])
        await within(pending)
    rows = {row["uid"]: row["group"] for row in RecordsReader(tmp_path).rows()}
    events = {event["uid"]: event["group"] for event in read_events(tmp_path) if event["kind"] == "rollout"}
    assert rows == events
    assert rows.pop("mine") == "g"
    assert len(rows) == 2
    assert len(set(rows.values())) == 1


def test_a_blocking_agents_step_has_a_timeline(tmp_path):
    with BlockingRewardAgent(recording(tmp_path, lambda solution_str: 1.0)) as agent, agent.step(1):
        pending = agent.submit([Sample("x", uid="q_0", step=1)])
        with agent.phase("update"):
            pass
        pending.result(timeout=30)
    with open_index(tmp_path) as index:
        drawn = timeline(index, 1)
    lanes = {lane["name"]: [span["name"] for span in lane["spans"]] for lane in drawn["lanes"]}
    assert "update" in lanes["trainer"]
    assert "rollouts" not in lanes  # when a sample was generated is not known
    assert ["q_0"] in lanes.values()


async def test_a_step_that_raises_is_recorded_and_the_next_one_begins(tmp_path):
    async with RewardAgent(recording(tmp_path, lambda solution_str: 1.0)) as agent:
        with pytest.raises(ValueError, match="mine"), agent.step(1):
            raise ValueError("mine")
        with agent.step(2):
            pass
    assert list(StepTimes(tmp_path).steps()) == [1, 2]


@pytest.mark.parametrize("records", [True, False])
async def test_wrong_use_is_refused_with_and_without_records(records, tmp_path):
    def score(solution_str):
        return 1.0

    async with RewardAgent(recording(tmp_path, score) if records else naive(score)) as agent:
        with pytest.raises(RewardLoopError, match="'update' is outside of a step"), agent.phase("update"):
            pass
        with agent.step(1), pytest.raises(ConfigError, match="'step' is reserved"), agent.phase("step"):
            pass
        with agent.step(1), pytest.raises(RewardLoopError, match="step 2 cannot begin: step 1"), agent.step(2):
            pass


async def test_nothing_is_recorded_without_a_folder_and_without_steps(tmp_path):
    async with RewardAgent(naive(lambda solution_str: 1.0)) as agent:
        with agent.step(1), agent.phase("update"):
            assert (await within(agent.submit([Sample("x")])))[0]["reward_extra_info"]["reward_outcome"] == "scored"
    async with RewardAgent(recording(tmp_path, lambda solution_str: 1.0)) as agent:
        await within(agent.submit([Sample("x")]))
    assert list(read_events(tmp_path)) == []
    assert [row["outcome"] for row in RecordsReader(tmp_path).rows()] == ["scored"]
