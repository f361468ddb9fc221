"""What happens to the prompts of a dead agent loop worker, without Ray: TransferQueue is a dict here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transfer_queue import KVBatchMeta

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError
from reward_loop.verl import recovery, tq_rows
from reward_loop.verl.agent_loop_manager import Assignments
from reward_loop.verl.recovery import Recovery
from reward_loop.verl.trajectory_keys import GENERATED

pytestmark = pytest.mark.integration  # it imports verl


class Queue:
    """Partitions of rows; each row has tags and names of fields."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.scored: set[str] = set()

    def prompt(self, uid: str, status: str, *sessions: int, partition: str = "train", generated: bool = False) -> None:
        items = self.tags[partition]
        items[uid] = {"is_prompt": True, "status": status, "global_steps": 1}
        items |= {f"{uid}_{session}_0": {"status": "success"} for session in sessions}
        if generated:
            items[f"{uid}_{sessions[-1]}_0"][GENERATED] = True

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict]]:
        return {name: dict(items) for name, items in self.tags.items() if partition_id in (None, name)}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[partition_id][key]

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: list[dict]) -> KVBatchMeta:
        for key, tag in zip(keys, tags, strict=True):
            self.tags[partition_id][key] = self.tags[partition_id].get(key, {}) | tag
        fields = ["responses", *(["rm_scores"] if keys[0] in self.scored else [])]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags, fields=fields)


class Manager:
    """The agent loop manager; worker 0 received all prompts of the test."""

    def __init__(self, queue: Queue, *uids: str) -> None:
        self.agent_loop_workers = ["old 0", "old 1"]
        self.assignments = Assignments()
        self.assignments.assign(0, [{} for _ in uids], uids)
        self.sent: dict[str, int] = {}
        self.dead = [0]
        self.late: dict[str, Any] = {}
        self._queue = queue

    def dead_workers(self) -> list[int]:
        return self.dead

    def prompts_of(self, workers: Any) -> set[str]:
        return self.assignments.of(workers)

    def prompt(self, uid: str) -> Any:
        return self.assignments.get(uid)[1][0]

    def replace(self, workers: Any, timeout_s: float) -> None:
        assert timeout_s == RewardLoopConfig().worker_start_timeout_s
        for number in workers:
            self.agent_loop_workers[number] = f"new {number}"
        self.dead = []
        for uid, tag in self.late.items():  # written before the death, and arrives now
            self._queue.tags["train"][uid] |= tag

    def send_again(self, uids: Any, step: int) -> None:
        self.assignments.count_deaths(uids)
        self.sent |= dict.fromkeys(uids, step)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(recovery, "tq", queue)
    monkeypatch.setattr(tq_rows, "tq", queue)
    return queue


class Rewards:
    """The reward workers, and the writes of their rewards."""

    def __init__(self, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.abandoned: list[set[str]] = []
        self.judged: list[str] = []
        self.client = SimpleNamespace(options=RewardLoopConfig())
        self._queue = queue
        monkeypatch.setattr(recovery, "read_sessions", lambda batch: (batch.keys, batch.keys))
        monkeypatch.setattr(recovery, "write_rewards", self._write)

    def _write(self, batch: Any, keys: list[str], rewards: list[str]) -> None:
        assert [f"reward of {key}" for key in keys] == rewards
        self._queue.scored |= set(keys)

    def abandon(self, uids: set[str]) -> None:
        self.abandoned.append(set(uids))

    def start_batch(self, rows: list[str]) -> list[str]:
        self.judged += rows
        return rows

    def finish_batch(self, pending: list[str]) -> list[str]:
        return [f"reward of {key}" for key in pending]


def recover(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, *uids: str, judges: bool = True
) -> tuple[Recovery, Manager, Rewards]:
    manager, rewards = Manager(queue, *uids), Rewards(queue, monkeypatch)
    return Recovery(manager, rewards, rollouts={"train": 2, "val": 1}, judges=judges), manager, rewards  # type: ignore[arg-type]


def test_prompts_without_all_trajectories_are_generated_again_from_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.prompt("a", "running", 0)
    queue.prompt("b", "pending")
    queue.prompt("v", "running", 1, partition="val")
    queue.prompt("other", "running", 0)  # of another worker
    recovering, manager, rewards = recover(queue, monkeypatch, "a", "b", "v")
    recovering.recover([0], step=7)
    assert manager.sent == {"a": 7, "b": 7, "v": 7}
    assert queue.tags["train"].keys() == {"a", "b", "other", "other_0_0"}
    assert queue.tags["val"].keys() == {"v"}
    for uid, partition in {"a": "train", "b": "train", "v": "val"}.items():
        tag = {"is_prompt": True, "status": "pending", "global_steps": 7}
        assert queue.tags[partition][uid] == tag
    assert rewards.abandoned == [{"a", "b", "v"}] * 2
    assert manager.agent_loop_workers == ["new 0", "old 1"]


def test_finished_prompts_stay_even_if_their_status_arrives_late(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.prompt("a", "finished", 0, 1)
    queue.prompt("b", "failure", 0)
    queue.prompt("late", "running", 0, 1)
    recovering, manager, rewards = recover(queue, monkeypatch, "a", "b", "late", "trained")
    manager.late = {"late": {"status": "finished"}}
    before = {key: dict(tag) for key, tag in queue.tags["train"].items()}
    recovering.recover([0], step=7)
    assert queue.tags["train"] == before | {"late": before["late"] | {"status": "finished"}}
    assert not manager.sent
    assert not rewards.judged


def test_generated_prompts_keep_their_trajectories_and_only_missing_rewards_are_computed(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    queue.prompt("b", "running", 1, generated=True)  # session 0 failed before it was published
    queue.prompt("v", "running", 0, partition="val", generated=True)
    queue.scored.add("a_1_0")  # the agent loop itself set this score
    recovering, manager, rewards = recover(queue, monkeypatch, "a", "b", "v")
    recovering.recover([0], step=7)
    assert sorted(rewards.judged) == ["a_0_0", "b_1_0", "v_0_0"]
    assert queue.scored == {"a_0_0", "a_1_0", "b_1_0", "v_0_0"}
    assert queue.tags["val"]["v"]["status"] == "finished"
    assert queue.tags["train"]["a"]["status"] == "finished"
    assert queue.tags["train"]["b"]["status"] == "failure"
    assert not manager.sent


def test_without_judges_in_the_agent_loop_generated_prompts_need_no_reward(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    recovering, _, rewards = recover(queue, monkeypatch, "a", judges=False)
    recovering.recover([0], step=7)
    assert not rewards.judged
    assert queue.tags["train"]["a"]["status"] == "finished"


def test_the_metrics_count_since_the_last_call(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.prompt("a", "running", 0)
    queue.prompt("b", "running", 0, 1, generated=True)
    recovering, _, _ = recover(queue, monkeypatch, "a", "b")
    recovering.poll(7)
    recovering.poll(7)  # nothing has died since
    names = ("agent_loop_workers_replaced", "prompts_generated_again", "prompts_judged_again")
    assert recovering.metrics() == {f"reward_loop/{name}": 1.0 for name in names}
    assert recovering.metrics() == {f"reward_loop/{name}": 0.0 for name in names}


def test_a_prompt_that_kills_its_workers_ends_the_run(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.prompt("a", "running")
    recovering, _, _ = recover(queue, monkeypatch, "a")
    for _ in range(3):
        recovering.recover([0], step=7)
    with pytest.raises(RewardLoopError, match="died in a row while they had prompt a"):
        recovering.recover([0], step=7)


def test_the_number_of_rollouts_of_a_prompt_may_differ(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.prompt("a", "running", 0, 1, 2, generated=True)
    recovering, manager, _ = recover(queue, monkeypatch, "a")
    manager.prompt = lambda uid: {"__rollout_n__": [3]}  # type: ignore[method-assign]
    recovering.recover([0], step=7)
    assert queue.tags["train"]["a"]["status"] == "finished"
