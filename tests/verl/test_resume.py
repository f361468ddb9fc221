"""What happens to the prompts of a checkpoint, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.errors import RewardLoopError
from reward_loop.verl import tq_rows
from reward_loop.verl.options import PIPELINE_MODE
from reward_loop.verl.samples import FAILURE, GENERATED, JUDGED
from reward_loop.verl.trainer.pipeline import RewardPipelineTrainer
from reward_loop.verl.trainer.resume import reset_unscored_prompts
from reward_loop.verl.trainer.separate_async import QueueSeparateAsyncTrainer
from tests.verl.configs import ROLLOUT_ELSEWHERE, resolved
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import Workers, constructed

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
            self.tags["train"][key][JUDGED] = True


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(tq_rows, "tq", queue)
    return queue


def statuses(queue: Queue) -> dict[str, str]:
    return {key: tag["status"] for key, tag in queue.tags["train"].items() if tag.get("is_prompt")}


def test_prompts_with_all_scores_are_kept_and_all_others_are_generated_again(queue: Queue) -> None:
    for uid in ("kept", "failed", "unscored", "default"):
        queue.prompt(uid, "finished", 0, 1)
        queue.reward(f"{uid}_0_0", 0.5)
    queue.reward("kept_1_0", 0.25, judged=False)  # by the agent loop
    queue.reward("failed_1_0", 0.0, "failed")
    queue.reward("unscored_1_0", 0.0, "unscored")
    queue.reward("default_1_0", -1.0, "failed", reward_masked=False)  # the policy `default`
    queue.prompt("open", "running", 0, 1, generated=True)
    queue.reward("open_0_0", 0.25)
    queue.prompt("raised", "failure", 0, 1)  # the policy `raise`, which ends the session with an error
    queue.reward("raised_0_0", 0.0, "failed")
    queue.prompt("short", "failure", 0)
    queue.reward("short_0_0", 0.5)
    queue.prompt("empty", "finished")  # verl accepts an agent loop that returns nothing
    queue.prompt("pending", "pending")
    reset_unscored_prompts(judged=True)
    again = dict.fromkeys(("failed", "unscored", "default", "open", "raised", "short", "pending"), "pending")
    assert statuses(queue) == {"kept": "finished", "empty": "finished"} | again


def test_rows_that_were_trained_on_are_deleted_at_a_resume(queue: Queue) -> None:
    queue.prompt("trained", "finished", 0, 1)
    queue.reward("trained_0_0", 0.0, "failed")  # masked: the step went on without it
    del queue.tags["train"]["trained"]
    queue.prompt("next", "finished", 0, 1)
    queue.reward("next_0_0", 0.5)
    queue.reward("next_1_0", 0.5)
    reset_unscored_prompts(judged=True)
    assert queue.rows.keys() == {"next_0_0", "next_1_0"}


def test_a_reward_model_on_the_trainers_gpus_judges_later(queue: Queue) -> None:
    queue.prompt("a", "finished", 0, 1)
    queue.prompt("b", "running", 0, generated=True)
    reset_unscored_prompts(judged=False)
    assert statuses(queue) == {"a": "finished", "b": "pending"}


MODES = {
    "sync": (PPOTrainerSync, "sync"),
    "reward_pipeline": (RewardPipelineTrainer, "sync"),
    "reward_pipeline, one_step_off_policy": (RewardPipelineTrainer, PIPELINE_MODE),
    "colocate_async": (PPOTrainerColocateAsync, "colocate_async"),
    "separate_async": (PPOTrainerSeparateAsync, "separate_async"),
    "separate_async with a queue": (QueueSeparateAsyncTrainer, "separate_async"),
}


@pytest.mark.parametrize("mode", MODES)
def test_verl_generates_only_those_prompts_of_a_checkpoint_again_that_lack_scores(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cls, name = MODES[mode]
    monkeypatch.setattr(trainer_base, "tq", queue)
    if name != "sync":  # otherwise, verl loads nothing into TransferQueue
        queue.prompt("done", "finished", 0, 1)
        queue.prompt("failed", "finished", 0, 1)
        for key, outcome in (("done_0_0", "scored"), ("done_1_0", "scored"), ("failed_0_0", "failed")):
            queue.reward(key, 0.5, outcome)
        queue.reward("failed_1_0", 0.5)
        queue.prompt("running", "running", 1)
        queue.prompt("error", "failure")
        for uid in statuses(queue):
            queue.rows[uid] = {"uid": uid, "raw_prompt": "1+1="}
    sent: list[str] = []
    configured = "sync" if cls is PPOTrainerSync else PIPELINE_MODE if cls is RewardPipelineTrainer else name
    made = constructed(resolved(f"trainer.v1.trainer_mode={configured}", *ROLLOUT_ELSEWHERE), cls)
    made.trainer_mode, made.global_steps = name, 7
    rows: list[dict[str, Any]] = []
    made._records = SimpleNamespace(write_rows=rows.extend, flush=lambda: None)
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=["a client"])
    made.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: sent.extend(batch["uid"]))
    made._health, made.reward_workers = SimpleNamespace(flush=lambda: None), Workers()

    def fit(self: Any, _: Any) -> None:  # verl counts the first step before it sends the prompts
        self.global_steps = 8
        self._reissue_inflight_prompts()

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    made.fit(None)
    (resumed,) = rows
    assert (resumed["step"], resumed["kept"], resumed["validates"]) == (7, [] if name == "sync" else ["done"], True)
    if name == "sync":
        assert not sent
        return
    assert sent == ["failed", "running", "error"]
    assert statuses(queue) == {"done": "finished", "failed": "pending", "running": "pending", "error": "pending"}
    assert queue.tags["train"]["running"]["global_steps"] == 8
    assert queue.tags["train"].keys() == {"done", "done_0_0", "done_1_0", "failed", "running", "error"}
    # Nothing of the dead process counts as a failure of this one.
    assert not any(tag.get(FAILURE) for tag in queue.tags["train"].values())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("budget", [(), ("reward_loop.budget.max_tokens=1000",)], ids=["no budget", "budget"])
def test_a_resumed_run_has_what_is_left_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool, budget: tuple[str, ...]
) -> None:
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: setattr(self, "global_steps", 3))
    folder = f"trainer.default_local_dir={tmp_path}"
    first = constructed(resolved(folder, *budget))
    first.global_steps = 3
    first._job.spent = 1.5, 200.0
    first._save_checkpoint()
    first._job.spent = 9.0, 900.0  # those steps are done again, and were paid for all the same

    def stops(*_: object) -> None:
        raise RewardLoopError("the run's budget is used up")

    monkeypatch.setattr(PPOTrainer, "step", stops)
    with pytest.raises(RewardLoopError, match="used up"):
        first.step({}, {})
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_3"]
    second = constructed(resolved(f"trainer.default_local_dir={tmp_path}/new", *resumed) if named else resolved(folder))
    second._load_checkpoint()
    # A checkpoint that is named may be older than what was done since, or that of another run.
    assert second._job.spent == ((9.0, 900.0) if budget and not named else (1.5, 200.0))


def test_usage_that_cannot_be_written_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = constructed(resolved(f"trainer.default_local_dir={tmp_path}", "reward_loop.budget.max_cost=2"))
    made.global_steps = 3

    def dies(*_: object) -> None:
        made._job.why = "the actor died"
        raise ValueError

    def usage() -> tuple[float, float]:
        raise RewardLoopError("no answer")

    monkeypatch.setattr(PPOTrainer, "step", dies)
    monkeypatch.setattr(made._job, "usage", usage)
    with pytest.raises(RewardLoopError, match="the actor died"):
        made.step({}, {})
    assert "could not be written: no answer" in caplog.text
