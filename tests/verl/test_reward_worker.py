from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.managers import registry
from reward_loop.managers.base import open_records
from reward_loop.records.reader import RecordsReader
from reward_loop.types import RESERVED_KEYS, RewardSample
from reward_loop.verl.run.job import Job
from reward_loop.verl.workers.reward_worker import RewardWorker
from tests.support.clock import until
from tests.verl.jobs import Handle
from tests.verl.rollouts import rollout

pytestmark = pytest.mark.integration  # imports verl

Settings = Callable[..., Any]

ONE = "async def compute_score(solution_str): return 1.0"


def verl_manager(name: str) -> tuple[str, ...]:
    path = Path(__file__).with_name("managers.py")
    return (f"reward_model.reward_loop_module_path={path}", f"reward_model.reward_loop_class_name={name}")


async def info_of(worker: RewardWorker, text: str, **columns: Any) -> dict[str, Any]:
    return (await worker.compute_score(rollout(text, **columns)))["reward_extra_info"]


async def scores_of(worker: RewardWorker, *texts: str, **columns: Any) -> list[float]:
    rewards = await asyncio.gather(*(worker.compute_score(rollout(text, **columns)) for text in texts))
    return [reward["reward_score"] for reward in rewards]


async def test_a_manager_written_for_verl_runs_unchanged(with_function: Settings) -> None:
    worker = RewardWorker(with_function(None, *verl_manager("Length")), None)
    reward = await worker.compute_score(rollout("four"))
    assert reward["reward_score"] == 4.0
    assert reward["reward_extra_info"]["text"] == "four"
    assert reward["reward_extra_info"]["reward_outcome"] == "scored"


@pytest.mark.parametrize(("on_node", "share"), [(None, 1), (4, 2), (1, 8), (16, 1)])
def test_by_default_the_workers_of_a_node_share_its_cores(
    with_function: Settings, monkeypatch: pytest.MonkeyPatch, on_node: int | None, share: int
) -> None:
    monkeypatch.setattr("reward_loop.verl.workers.managers.usable_cores", lambda: 8)
    settings = with_function(ONE.removeprefix("async "), "reward.num_workers=8", "reward_loop.isolation=process")
    assert f"max_processes={share}," in repr(RewardWorker(settings, None, on_node)._manager.function)


@pytest.mark.parametrize(
    ("name", "overrides", "cause"),
    [
        ("Raises", [], "Raises .* raised ConnectionError: the sandbox is gone"),
        ("Hangs", ["reward_loop.timeout=0.01"], "Hangs .* ran past its deadline of 0.01 s"),
        ("NotANumber", [], "NotANumber.*nan"),
    ],
)
async def test_an_error_in_a_manager_of_verl_is_a_failed_sample(
    with_function: Settings, name: str, overrides: list[str], cause: str
) -> None:
    once = ("reward_loop.retry.max_attempts=1", "reward_loop.outage_timeout_s=0")
    worker = RewardWorker(with_function(None, *verl_manager(name), *once, *overrides), None)
    info = await info_of(worker, "four")
    assert info["reward_outcome"] == "failed"
    assert info["reward_masked"]
    assert re.search(cause, info["reward_error"])
    assert worker._limits.stopped is None


HOLDS = """
import asyncio, reward_loop
async def compute_score(solution_str):
    async with reward_loop.limit("judge"):
        await asyncio.Event().wait()
"""


async def test_the_calls_of_a_stopped_worker_are_cancelled_without_an_error(
    with_function: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}))
    monkeypatch.setattr(ray, "get_actor", lambda name: Handle(job))
    worker = RewardWorker(
        with_function(HOLDS, "+reward_loop.limits.judge.max_concurrent=1"), None, job="the job", name="a"
    )
    calls = [asyncio.create_task(worker.compute_score(rollout("4", uid=uid))) for uid in "ab"]
    await until(lambda: job._limits.limiters["judge"].waiting == 1)
    await worker.stop()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
    assert await job.why_stopped() is None
    assert caplog.records == []


async def test_a_manager_written_for_verl_cannot_score_a_sample_of_an_agent_loop(with_function: Settings) -> None:
    worker = RewardWorker(with_function(None, *verl_manager("Length")), None)
    with pytest.raises(ConfigError, match=r"reward_loop\.score, which reward manager Length .* cannot answer"):
        await worker.compute_score(RewardSample("x"))


REGISTERS = """
from reward_loop import NaiveRewardLoopManager, register

def compute_score(solution_str):
    return 1.0

@register("doubling")
class Doubling(NaiveRewardLoopManager):
    async def run_single(self, data):
        reward = await super().run_single(data)
        return reward | {"reward_score": 2 * reward["reward_score"]}
"""


async def test_a_manager_that_the_functions_file_registers_is_found(
    with_function: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))
    worker = RewardWorker(with_function(REGISTERS, "reward_model.reward_manager=doubling"), None)
    assert await scores_of(worker, "4") == [2.0]


async def test_a_batch_function(with_function: Settings) -> None:
    source = "def compute_score(solution_strs, unit): return [unit * len(text) for text in solution_strs]\n"
    worker = RewardWorker(with_function(source, "reward_model.reward_manager=batch", unit=10), None)
    assert await scores_of(worker, "x", "xx", "xxx") == [10, 20, 30]
    assert await worker.needs_group() is False
    with pytest.raises(ConfigError, match=r"needs a function of lists: set custom_reward_function\.path"):
        RewardWorker(with_function(None, "reward_model.reward_manager=batch"), None)


async def test_without_a_function_verls_rules_apply_by_data_source(with_function: Settings) -> None:
    worker = RewardWorker(with_function(None), None)
    assert await scores_of(worker, "#### 2", "#### 3", data_source="openai/gsm8k") == [1.0, 0.0]
    unknown = await info_of(worker, "2", data_source="nonesuch")
    assert unknown["reward_outcome"] == "failed"
    assert "nonesuch" in unknown["reward_error"]


POST_PROCESSES = """
class compute_score:
    def compute_score(self, solution_str):
        if solution_str == "?":
            return None
        return {"score": float(solution_str), "turn_level_scores": [float(solution_str)]}

    def post_process_scores(self, scores):
        return [score - max(scores) for score in scores]
"""


async def group(worker: RewardWorker, *texts: str, lost: tuple[str, ...] = (), **columns: Any) -> list[Any]:
    """Score the rollouts of a prompt as an agent loop worker does, which reports those that are lost."""
    fields = {"uid": "x", "group_size": len(texts) + len(lost), "__turns__": [1], **columns}
    calls = (worker.compute_score(rollout(text, session_id=i, **fields), lost) for i, text in enumerate(texts))
    async with asyncio.timeout(60):
        return await asyncio.gather(*calls)


async def test_the_scores_of_a_group_are_post_processed(with_function: Settings) -> None:
    worker = RewardWorker(with_function(POST_PROCESSES), None)
    assert await worker.needs_group()
    processed = await group(worker, "1", "?", "3", lost=("x_3",))
    assert [reward["reward_score"] for reward in processed] == [-2, 0, 0]
    assert [reward["reward_extra_info"]["reward_outcome"] for reward in processed] == ["scored", "unscored", "scored"]
    assert [reward["reward_score"] for reward in await group(worker, "1", "4", __validate__=True)] == [-3, 0]
    waiting = asyncio.create_task(group(worker, "2", group_size=2))
    await asyncio.sleep(0.05)
    await worker.lose("x", 2, ["x_1"])
    assert [reward["reward_score"] for reward in await waiting] == [0]


def test_post_processing_beside_a_manager_written_for_verl_is_refused(with_function: Settings) -> None:
    with pytest.raises(ConfigError, match=r"post_process_scores.*Length"):
        RewardWorker(with_function(POST_PROCESSES, *verl_manager("Length")), None)


def test_the_sandbox_bound_is_shared_among_the_workers(with_function: Settings) -> None:
    from reward_loop.verl.workers.managers import _sandbox_kwargs

    overrides = ("sandbox_fusion.url=http://x", "sandbox_fusion.max_concurrent=10", "reward.num_workers=3")
    kwargs = _sandbox_kwargs(with_function(None, *overrides), 1)
    assert kwargs["sandbox_requests"] == 3
    assert kwargs["sandbox_fusion_url"] == "http://x"


REWARDS = """
def compute_score(solution_str):
    return {"score": 1.0, "reward": 2.0, "right": True}
"""


async def test_the_key_reward_does_not_get_into_verls_column_of_a_validation(
    with_function: Settings, tmp_path: Path
) -> None:
    settings = with_function(REWARDS, f"reward_loop.log_dir={tmp_path}/records")
    worker = RewardWorker(settings, None)
    for validated in (rollout("4", __validate__=True, uid="v"), RewardSample("x", uid="v_0", validate=True)):
        reward = await worker.compute_score(validated)
        returned = {name: value for name, value in reward["reward_extra_info"].items() if name not in RESERVED_KEYS}
        assert (reward["reward_score"], returned) == (1.0, {"score": 1.0, "returned_reward": 2.0, "right": True})
    for trained in (rollout("4", uid="t"), RewardSample("x", uid="t_0", validate=False)):
        reward = await worker.compute_score(trained)
        assert (reward["reward_score"], reward["reward_extra_info"]["reward"]) == (1.0, 2.0)
    records = open_records(settings.options)
    assert records is not None
    assert await asyncio.to_thread(records.flush)
    rows = {row["uid"]: row["validate"] for row in RecordsReader(tmp_path / "records").rows()}
    assert rows == {"v": True, "v_0": True, "t": False, "t_0": False}
