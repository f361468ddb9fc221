"""verl's own replay buffer with the overrides of this library. TransferQueue is a dict here."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import replay_buffer as verls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.verl.options import SamplerOptions
from reward_loop.verl.tq_rows import TrajectoryReward
from reward_loop.verl.trainer import replay_buffer
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer, extend

pytestmark = pytest.mark.integration  # imports verl


class Clock:
    """A clock on which a poll takes a second, and the pauses that verl asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replay_buffer, "monotonic", clock)
    monkeypatch.setattr(verls, "time", SimpleNamespace(sleep=clock.sleep, time=time.time))
    return clock


def buffer(
    cls: type[ReplayBuffer] = ReplayBuffer,
    metric: str | None = None,
    stall_timeout_s: float | None = None,
) -> RewardReplayBuffer:
    plain = cls(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
        refill_fn=lambda count: None,
        filter_groups_metric=metric,
    )
    return extend(plain, SamplerOptions(poll_interval_s=0.2, stall_timeout_s=stall_timeout_s))


def poll(buffer: RewardReplayBuffer, times: int, partition_id: str = "train") -> None:
    for _ in range(times):
        buffer._wait_for_next_poll(partition_id, time.time())


def test_a_wait_without_news_ends_and_names_what_is_missing(clock: Clock) -> None:
    stalled = buffer(stall_timeout_s=10)
    stalled.running_keys["val"] = {f"p{i}" for i in range(7)}
    stalled.partitions["val"] = {"p1_0_0": {"judged": True}, "p1_2_0": {}, "p1_2_1": {}}
    with pytest.raises(RewardLoopError) as caught:
        poll(stalled, 20, "val")
    message = str(caught.value)
    assert "11 s while validation waited for 7 prompts (trainer.v1.sampler.stall_timeout_s=10)" in message
    assert "The first prompts: p0, p1, p2, p3, p4; generated, without a reward: p1_2_0, p1_2_1" in message


def test_news_and_work_between_waits_do_not_count(clock: Clock) -> None:
    busy = buffer(stall_timeout_s=10)
    busy.pending_keys["train"] = {"p"}
    for number in range(5):
        poll(busy, 9)
        busy.partitions["train"][f"p_{number}_0"] = {}
    poll(busy, 5)
    clock.now += 1000  # the trainer updates
    poll(busy, 5)
    busy.partitions["train"]["p_0_0"] = {"judged": True}
    poll(busy, 8)
    assert len(clock.pauses) == 63


def test_an_error_of_a_check_ends_the_wait(clock: Clock) -> None:
    def check() -> None:
        if clock.now > 3:
            raise RewardLoopError("too many failures")

    watched = buffer()
    watched.checks.append(check)
    with pytest.raises(RewardLoopError, match="too many failures"):
        poll(watched, 9)
    assert len(clock.pauses) == 4


def test_the_buffer_keeps_verls_class_and_state() -> None:
    extended = buffer(ReplayBufferAsync)
    assert isinstance(extended, ReplayBufferAsync)
    assert (extended.trainer_mode, extended.max_off_policy_strategy) == ("sync", "wait")


def test_a_custom_sampler_that_is_not_a_replay_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"custom_sampler.*must inherit from .*ReplayBuffer"):
        extend(object(), SamplerOptions())


ALIKE = TrajectoryReward({"acc": 1.0}, reward=1.0)


def finished(
    monkeypatch: pytest.MonkeyPatch,
    rows: dict[str, dict[str, Any]],
    metric: str | None,
) -> RewardReplayBuffer:
    """A buffer whose groups have finished, with these rewards and this ``reward_extra_info``."""

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[Any]]:
        return {"extra_fields": [{"reward_extra_info": rows[key]} for key in keys]}

    def read_rewards(batch: Any) -> dict[str, TrajectoryReward]:
        return {key: TrajectoryReward(rows[key], rows[key].get("score", 0.0)) for key in batch.keys}

    monkeypatch.setattr(replay_buffer, "read_rewards", read_rewards)
    monkeypatch.setattr(verls, "tq", SimpleNamespace(kv_batch_get=get))
    filled = buffer(metric=metric)
    for key in rows:
        filled.partitions["train"][key] = {"tag": key}
        filled.finished_keys["train"].add(key.split("_")[0])
    return filled


def group(name: str, *scores: float | None, **info: Any) -> dict[str, dict[str, Any]]:
    """The samples of a group; ``None`` is a masked one."""
    masked = {"reward_outcome": "failed", "reward_masked": True}
    return {
        f"{name}_{i}_0": masked if score is None else {"reward_outcome": "scored", "score": score, "acc": score, **info}
        for i, score in enumerate(scores)
    }


@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_groups_are_filtered_by_their_scored_samples(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    """Samples that are masked or have a default score tell nothing of the prompt."""
    default = {"reward_outcome": "failed", "score": -1.0, "acc": -1.0}
    unscored = {"reward_outcome": "unscored", "score": 0.0, "acc": 0.0}
    filtered = {
        **group("alike", 1.0, 1.0, 1.0, None),
        **group("zeros", 0.0, None, 0.0),
        **group("half", 0.5, 0.5),
        "half_2_0": default,
    }
    kept = {
        **group("mixed", 1.0, 0.0, 1.0, None),
        **group("zero", 0.0, 1.0, None),
        **group("several", 1.0, 0.0),
        "several_2_0": default,
        # Fewer than two scores say nothing of the prompt.
        **group("one", 1.0, None, None),
        "one_0_1": {"reward_outcome": "scored", "score": 1.0, "acc": 1.0},  # another output of the session
        **group("none", None, None),
        **{f"failed_{i}_0": default for i in range(2)},
        **{f"unscored_{i}_0": unscored for i in range(2)},
    }
    ours = finished(monkeypatch, filtered | kept, metric)
    for _ in range(2):
        assert ours._dapo_filtered_keys("train") == ({"alike", "zeros", "half"}, Counter({1.0: 1, 0.0: 1, 0.5: 1}))
    assert ours._dapo_filtered_keys("val") == (set(), Counter())


def test_a_score_without_the_metric_ends_the_run_as_in_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = finished(monkeypatch, {"a_0_0": {"reward_outcome": "scored"}, "a_1_0": {"acc": 1.0}}, "acc")
    with pytest.raises(RuntimeError, match="missing DAPO metric 'acc'"):
        ours._dapo_filtered_keys("train")


def test_evicted_groups_are_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = {"is_prompt": True, "global_steps": 2}
    items = {
        "a": {**prompt, "status": "failure"},
        "b": {**prompt, "status": "finished"},
        "b_0_0": {},
        "b_1_0": {},
        # Of step 1: their rollouts are two steps old in step 3. One is still being judged.
        "c": {**prompt, "status": "finished", "global_steps": 1},
        "c_0_0": {},
        "d": {**prompt, "status": "running", "global_steps": 1},
        "d_0_0": {},
    }
    cleared: list[str] = []
    queue = SimpleNamespace(kv_list=lambda: {"train": items}, kv_clear=lambda partition_id, keys: cleared.extend(keys))
    monkeypatch.setattr(verls, "tq", queue)
    monkeypatch.setattr(replay_buffer, "read_rewards", lambda batch: dict.fromkeys(batch.keys, ALIKE))
    ours = buffer(metric="acc")
    ours.sync_refill_failed_groups = True
    metrics: dict[str, Any] = {}
    assert ours.evict(3, metrics) == ({"a", "b", "c"}, 1)
    assert sorted(cleared) == ["a", "b", "b_0_0", "b_1_0", "c", "c_0_0"]
    for reason in ("rollout_failure", "filter_groups", "off_policy"):
        assert metrics[f"training/{reason}/evicted_samples"] == 1


def test_what_is_generated_and_judged_is_read_from_the_tags(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, dict[str, dict]] = {"train": {}}
    monkeypatch.setattr(verls, "tq", SimpleNamespace(kv_list=lambda: tags))

    def write(key: str, **tag: Any) -> None:
        tags["train"].setdefault(key, {"global_steps": 1}).update(tag)

    for uid in "ab":
        write(uid, is_prompt=True, status="running")
    read = buffer(stall_timeout_s=10)
    assert (read.unfinished(), read.generating()) == ({"a", "b"}, {"a", "b"})
    write("a_0_0", status="success")
    write("a_1_0", status="success", generated=True)
    assert (read.unfinished(), read.generating()) == ({"a", "b"}, {"b"})
    write("a", status="finished")
    write("b", status="failure")  # none of its sessions has a trajectory
    assert (read.unfinished(), read.generating()) == (set(), set())
    write("c", is_prompt=True, status="pending")
    with pytest.raises(RewardLoopError, match="training waited for 1 prompts"):
        read.wait(lambda: not read.generating())
