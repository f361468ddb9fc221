"""What happens to the prompts of a dead agent loop worker, or of a checkpoint, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError
from reward_loop.types import Reward
from reward_loop.verl import recovery, tq_rows
from reward_loop.verl.agent_loop_manager import Assignments
from reward_loop.verl.mode_options import PIPELINE_MODE
from reward_loop.verl.pipeline import RewardPipelineTrainer
from reward_loop.verl.recovery import Recovery
from reward_loop.verl.separate_async import QueueSeparateAsyncTrainer
from reward_loop.verl.trajectory_keys import FAILURE, GENERATED, JUDGED
from tests.verl.configs import resolved
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import constructed

pytestmark = pytest.mark.integration  # it imports verl


class Queue(FakeQueue):
    """With prompts, and their trajectories of one output in sessions 0, 1, ..."""

    def prompt(self, uid: str, status: str, *sessions: int, partition: str = "train", generated: bool = False) -> None:
        self.tags[partition][uid] = {"is_prompt": True, "status": status, "global_steps": 1}
        for session in sessions:
            key = f"{uid}_{session}_0"
            self.tags[partition][key] = {"status": "success"}
            ids = torch.arange(3)
            self.rows[key] = {
                **dict.fromkeys(("prompts", "responses", "input_ids", "position_ids", "response_mask"), ids),
                "uid": uid,
                "session_id": session,
                "num_turns": 2,
                "extra_fields": {"tool": "used"},
            }
        if generated:
            self.tags[partition][f"{uid}_{sessions[-1]}_0"][GENERATED] = True

    def reward(self, key: str, score: float, outcome: str = "scored", *, judged: bool = True, **info: Any) -> None:
        """Write a reward to a trajectory; not ``judged``, if its agent loop has set the reward."""
        scores = torch.tensor([0.0, 0.0, score])
        self.rows[key]["rm_scores"] = scores
        masked = outcome != "scored"
        info = {"reward_outcome": outcome, "reward_masked": masked, "reward_error": "the judge is away" * masked} | info
        self.rows[key]["extra_fields"] = {**self.rows[key]["extra_fields"], "reward_extra_info": info}
        if judged:
            self.tags["train"][key][JUDGED] = [1.0, 2.0]

    def scores(self) -> dict[str, float]:
        return {key: float(row["rm_scores"].sum()) for key, row in self.rows.items() if "rm_scores" in row}


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


NEW = 9.0
"""The score of what is judged in a test."""


class Rewards:
    """The reward workers."""

    def __init__(self) -> None:
        self.abandoned: list[set[str]] = []
        self.received: list[DataProto] = []
        self.client = SimpleNamespace(options=RewardLoopConfig(), by_group=False)
        self.outcome = "scored"

    @property
    def judged(self) -> list[str]:
        return sorted(
            "{}_{}".format(*(sample.non_tensor_batch[name][-1] for name in ("uid", "session_id")))
            for sample in self.received
        )

    def abandon(self, uids: set[str]) -> None:
        self.abandoned.append(set(uids))

    def score_batch(self, samples: list[DataProto]) -> list[Reward]:
        self.received += samples
        scored = self.outcome == "scored"
        info = {
            "reward_outcome": self.outcome,
            "reward_masked": not scored,
            "reward_error": "still away" * (not scored),
        }
        return [Reward(reward_score=NEW if scored else 0.0, reward_extra_info=info) for _ in samples]


def recover(
    queue: Queue, *uids: str, judges: bool = True, replaceable: bool = True
) -> tuple[Recovery, Manager, Rewards]:
    manager, rewards = Manager(queue, *uids), Rewards()
    replaced: Any = manager if replaceable else None  # a manager of the user, or of a recipe
    return Recovery(replaced, rewards, rollouts={"train": 2, "val": 1}, judges=judges), manager, rewards  # type: ignore[arg-type]


def test_prompts_without_all_trajectories_are_generated_again_from_nothing(queue: Queue) -> None:
    queue.prompt("a", "running", 0)
    queue.prompt("b", "pending")
    queue.prompt("v", "running", 1, partition="val")
    queue.prompt("other", "running", 0)  # of another worker
    recovering, manager, rewards = recover(queue, "a", "b", "v")
    recovering.recover([0], step=7)
    assert manager.sent == {"a": 7, "b": 7, "v": 7}
    assert queue.tags["train"].keys() == {"a", "b", "other", "other_0_0"}
    assert queue.tags["val"].keys() == {"v"}
    for uid, partition in {"a": "train", "b": "train", "v": "val"}.items():
        tag = {"is_prompt": True, "status": "pending", "global_steps": 7, FAILURE: None}
        assert queue.tags[partition][uid] == tag
    assert rewards.abandoned == [{"a", "b", "v"}] * 2
    assert manager.agent_loop_workers == ["new 0", "old 1"]


def test_finished_prompts_stay_even_if_their_status_arrives_late(queue: Queue) -> None:
    queue.prompt("a", "finished", 0, 1)
    queue.prompt("b", "failure", 0)
    queue.prompt("late", "running", 0, 1)
    recovering, manager, rewards = recover(queue, "a", "b", "late", "trained")
    manager.late = {"late": {"status": "finished"}}
    before = {key: dict(tag) for key, tag in queue.tags["train"].items()}
    recovering.recover([0], step=7)
    assert queue.tags["train"] == before | {"late": before["late"] | {"status": "finished"}}
    assert not manager.sent
    assert not rewards.judged


def test_generated_prompts_keep_their_trajectories_and_only_missing_rewards_are_computed(queue: Queue) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    queue.prompt("b", "running", 1, generated=True)  # session 0 failed before it was published
    queue.prompt("v", "running", 0, partition="val", generated=True)
    queue.reward("a_1_0", 0.5, judged=False)  # the agent loop itself set this score
    recovering, manager, rewards = recover(queue, "a", "b", "v")
    recovering.recover([0], step=7)
    assert rewards.judged == ["a_0", "b_1", "v_0"]
    assert queue.scores() == {"a_0_0": NEW, "a_1_0": 0.5, "b_1_0": NEW, "v_0_0": NEW}
    assert queue.tags["val"]["v"]["status"] == "finished"
    assert queue.tags["train"]["a"]["status"] == "finished"
    assert queue.tags["train"]["b"]["status"] == "failure"
    assert not manager.sent


def test_without_judges_in_the_agent_loop_generated_prompts_need_no_reward(queue: Queue) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    recovering, _, rewards = recover(queue, "a", judges=False)
    recovering.recover([0], step=7)
    assert not rewards.judged
    assert queue.tags["train"]["a"]["status"] == "finished"


def test_the_metrics_count_since_the_last_call(queue: Queue) -> None:
    queue.prompt("a", "running", 0)
    queue.prompt("b", "running", 0, 1, generated=True)
    recovering, _, _ = recover(queue, "a", "b")
    recovering.poll(7)
    recovering.poll(7)  # nothing has died since
    names = ("agent_loop_workers_replaced", "prompts_generated_again", "prompts_judged_again")
    assert recovering.metrics() == {f"reward_loop/{name}": 1.0 for name in names}
    assert recovering.metrics() == {f"reward_loop/{name}": 0.0 for name in names}


def test_a_prompt_that_kills_its_workers_ends_the_run(queue: Queue) -> None:
    queue.prompt("a", "running")
    recovering, _, _ = recover(queue, "a")
    for _ in range(3):
        recovering.recover([0], step=7)
    with pytest.raises(RewardLoopError, match="died in a row while they had prompt a"):
        recovering.recover([0], step=7)


def test_the_number_of_rollouts_of_a_prompt_may_differ(queue: Queue) -> None:
    queue.prompt("a", "running", 0, 1, 2, generated=True)
    recovering, manager, _ = recover(queue, "a")
    manager.prompt = lambda uid: {"__rollout_n__": [3]}  # type: ignore[method-assign]
    recovering.recover([0], step=7)
    assert queue.tags["train"]["a"]["status"] == "finished"


def resume(queue: Queue, *, judges: bool = True, by_group: bool = False, outcome: str = "scored") -> Rewards:
    recovering, _, rewards = recover(queue, judges=judges)
    rewards.client.by_group, rewards.outcome = by_group, outcome
    recovering.resume()
    return rewards


def statuses(queue: Queue) -> dict[str, str]:
    return {key: tag["status"] for key, tag in queue.tags["train"].items() if tag.get("is_prompt")}


def outcome(queue: Queue, key: str) -> str:
    return str(queue.rows[key]["extra_fields"]["reward_extra_info"]["reward_outcome"])


def test_a_resumed_run_judges_again_what_has_no_score_and_keeps_every_score(queue: Queue) -> None:
    queue.prompt("a", "finished", 0, 1)
    queue.reward("a_0_0", 0.5)
    queue.reward("a_1_0", 0.0, "failed")
    queue.prompt("b", "finished", 0, 1)
    queue.reward("b_0_0", 0.0, "unscored")
    queue.reward("b_1_0", -1.0, "failed", reward_masked=False)  # the policy `default`
    queue.prompt("open", "running", 0, 1, generated=True)
    queue.reward("open_0_0", 0.25)
    queue.prompt("raised", "failure", 0, 1)  # the policy `raise`, which ends the session with an error
    queue.reward("raised_0_0", 0.0, "failed")
    queue.reward("raised_1_0", 0.75)
    queue.prompt("done", "finished", 0, 1)
    queue.reward("done_0_0", 0.1)
    queue.reward("done_1_0", 0.2, judged=False)  # by the agent loop
    rewards = resume(queue)
    assert rewards.judged == ["a_1", "b_0", "b_1", "open_1", "raised_0"]
    assert queue.scores() == {
        "a_0_0": 0.5,
        "a_1_0": NEW,
        "b_0_0": NEW,
        "b_1_0": NEW,
        "open_0_0": 0.25,
        "open_1_0": NEW,
        "raised_0_0": NEW,
        "raised_1_0": 0.75,
        "done_0_0": pytest.approx(0.1),
        "done_1_0": pytest.approx(0.2),
    }
    assert {outcome(queue, key) for key in queue.rows} == {"scored"}
    assert statuses(queue) == dict.fromkeys(("a", "b", "open", "raised", "done"), "finished")
    for sample in rewards.received:  # what the agent loop returned, without the reward that failed
        assert isinstance(sample, DataProto)
        assert sample.non_tensor_batch["tool_extra_fields"][0] == {"tool": "used"}


def test_what_fails_again_after_a_resume_is_judged_again_at_the_next_one(queue: Queue) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    queue.reward("a_0_0", 0.0, "failed")
    assert resume(queue, outcome="failed").judged == ["a_0", "a_1"]
    assert outcome(queue, "a_0_0") == outcome(queue, "a_1_0") == "failed"
    assert queue.rows["a_0_0"]["extra_fields"]["reward_extra_info"]["reward_error"] == "still away"
    assert resume(queue).judged == ["a_0", "a_1"]
    assert queue.scores() == {"a_0_0": NEW, "a_1_0": NEW}


def test_prompts_that_lack_rollouts_are_generated_again_and_old_errors_are_forgotten(queue: Queue) -> None:
    queue.prompt("short", "failure", 0)
    queue.prompt("empty", "failure")
    queue.prompt("running", "running", 1)
    queue.prompt("pending", "pending")
    for uid in ("short", "empty"):
        queue.tags["train"][uid][FAILURE] = f"{uid}_1: ConnectionError: the judge is away"
    queue.reward("short_0_0", 0.5)
    assert "the judge is away" in tq_rows.last_failure()
    rewards = resume(queue)
    assert not rewards.judged
    assert set(statuses(queue).values()) == {"pending"}
    assert "the judge is away" not in tq_rows.last_failure()


def test_a_prompt_whose_agent_loops_returned_nothing_stays_finished(queue: Queue) -> None:
    queue.prompt("a", "finished", 0)
    queue.reward("a_0_0", 0.5)
    assert not resume(queue).judged
    assert statuses(queue) == {"a": "finished"}


def test_the_number_of_rollouts_of_a_prompt_of_a_checkpoint_may_differ(queue: Queue) -> None:
    for uid, size in (("one", 1), ("three", 3)):
        queue.prompt(uid, "running", 0)
        queue.rows[uid] = {"__rollout_n__": size}
    assert resume(queue).judged == ["one_0"]
    assert statuses(queue) == {"one": "finished", "three": "pending"}


def test_rows_that_were_trained_on_are_deleted_at_a_resume(queue: Queue) -> None:
    queue.prompt("trained", "finished", 0, 1)
    queue.reward("trained_0_0", 0.0, "failed")  # masked: the step went on without it
    del queue.tags["train"]["trained"]
    queue.prompt("next", "finished", 0, 1)
    queue.reward("next_0_0", 0.5)
    queue.reward("next_1_0", 0.5)
    assert not resume(queue).judged
    assert queue.rows.keys() == {"next_0_0", "next_1_0"}


def test_all_outputs_of_a_rollout_get_the_new_reward(queue: Queue) -> None:
    queue.prompt("a", "finished", 0, 1)
    queue.tags["train"]["a_0_1"] = dict(queue.tags["train"]["a_0_0"])
    queue.rows["a_0_1"] = dict(queue.rows["a_0_0"])
    for key in ("a_0_0", "a_0_1", "a_1_0"):
        queue.reward(key, 0.0, "failed")
    assert resume(queue).judged == ["a_0", "a_1"]
    assert queue.scores() == dict.fromkeys(("a_0_0", "a_0_1", "a_1_0"), NEW)


def test_a_manager_that_compares_rollouts_gets_the_whole_prompt_again(queue: Queue) -> None:
    for uid in ("a", "b"):
        queue.prompt(uid, "finished", 0, 1)
        queue.reward(f"{uid}_0_0", 0.5)
        queue.reward(f"{uid}_1_0", 0.5)
    queue.reward("a_1_0", 0.0, "failed")
    queue.prompt("c", "running", 0, 1, generated=True)
    queue.reward("c_0_0", 0.5, judged=False)  # by the agent loop
    assert resume(queue, by_group=True).judged == ["a_0", "a_1", "c_1"]
    assert queue.scores() == {"a_0_0": NEW, "a_1_0": NEW, "b_0_0": 0.5, "b_1_0": 0.5, "c_0_0": 0.5, "c_1_0": NEW}


def test_scores_that_were_post_processed_without_the_failed_one_are_post_processed_again(queue: Queue) -> None:
    for uid in ("a", "b"):
        queue.prompt(uid, "finished", 0, 1)
        queue.reward(f"{uid}_0_0", 0.5)
        queue.reward(f"{uid}_1_0", 0.25)
    queue.reward("a_1_0", 0.0, "failed")
    batch = tq_rows.read_trajectories(("a", "b"))
    before = tq_rows.read_rewards(batch)
    doubled = [Reward(reward_score=2 * old.reward, reward_extra_info=dict(old.info)) for old in before.values()]
    tq_rows.write_rewards(batch, list(before), doubled, {key: old.reward for key, old in before.items()})
    resume(queue)
    after = tq_rows.read_rewards(batch)
    assert queue.scores() == {"a_0_0": 0.5, "a_1_0": NEW, "b_0_0": 1.0, "b_1_0": 0.5}
    assert [reward.post_processed for reward in after.values()] == [False, False, True, True]


def test_a_rollout_whose_agent_loop_got_no_score_is_generated_again(queue: Queue) -> None:
    """The agent loop awaited the reward, and may have used it: nobody else can compute it."""
    queue.prompt("a", "finished", 0, 1)
    queue.reward("a_0_0", 0.0, "failed", judged=False)
    queue.reward("a_1_0", 0.0, "failed")
    assert not resume(queue).judged
    assert statuses(queue) == {"a": "pending"}


def test_the_metrics_count_the_prompts_of_a_resume(queue: Queue) -> None:
    queue.prompt("a", "pending")
    queue.prompt("b", "finished", 0, 1)
    queue.reward("b_0_0", 0.5)
    recovering, _, _ = recover(queue)
    recovering.resume()
    assert recovering.metrics() == {
        "reward_loop/agent_loop_workers_replaced": 0.0,
        "reward_loop/prompts_generated_again": 1.0,
        "reward_loop/prompts_judged_again": 1.0,
    }


def test_a_reward_model_on_the_trainers_gpus_judges_later(queue: Queue) -> None:
    queue.prompt("a", "running", 0, 1, generated=True)
    assert not resume(queue, judges=False).judged
    assert statuses(queue) == {"a": "finished"}


MODES = {
    "sync": (PPOTrainerSync, "sync"),
    "reward_pipeline": (RewardPipelineTrainer, "sync"),
    "reward_pipeline, one_step_off_policy": (RewardPipelineTrainer, PIPELINE_MODE),
    "colocate_async": (PPOTrainerColocateAsync, "colocate_async"),
    "separate_async": (PPOTrainerSeparateAsync, "separate_async"),
    "separate_async with a queue": (QueueSeparateAsyncTrainer, "separate_async"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replaceable", [True, False])
def test_verl_generates_only_those_prompts_of_a_checkpoint_again_that_lack_rollouts(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, mode: str, replaceable: bool
) -> None:
    cls, name = MODES[mode]
    monkeypatch.setattr(trainer_base, "tq", queue)
    if name != "sync":  # otherwise, verl loads nothing into TransferQueue
        queue.prompt("failed", "finished", 0, 1)
        queue.reward("failed_0_0", 0.0, "failed")
        queue.reward("failed_1_0", 0.5)
        queue.prompt("open", "running", 0, 1, generated=True)
        queue.prompt("running", "running", 1)
        queue.prompt("error", "failure")
        for uid in statuses(queue):
            queue.rows[uid] = {"uid": uid, "raw_prompt": "1+1="}
    recovering, _, rewards = recover(queue, replaceable=replaceable)
    sent: list[str] = []
    configured = "sync" if cls is PPOTrainerSync else PIPELINE_MODE if cls is RewardPipelineTrainer else name
    rollout = "actor_rollout_ref.rollout"
    separate = (f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.checkpoint_engine.backend=nccl")
    made = constructed(resolved(f"trainer.v1.trainer_mode={configured}", *separate), cls)
    made.trainer_mode, made.global_steps, made.recovery = name, 8, recovering
    made.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: sent.extend(batch["uid"]))
    made._reissue_inflight_prompts()
    if name == "sync":
        assert not sent
        assert not rewards.received
        return
    assert sent == ["running", "error"]
    assert rewards.judged == ["failed_0", "open_0", "open_1"]
    assert statuses(queue) == {"failed": "finished", "open": "finished", "running": "pending", "error": "pending"}
    assert queue.tags["train"]["running"]["global_steps"] == 8
    assert "running_1_0" not in queue.tags["train"]
    # Nothing of the dead process counts as a failure of this one.
    assert not any(tag.get(FAILURE) for tag in queue.tags["train"].values())
