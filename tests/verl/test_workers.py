from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import GetTimeoutError
from tensordict import TensorDict

from examples.tiny_models import tiny_tokenizer
from reward_loop.audit import AuditCounts
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, RewardFunctionError, RewardLoopError, TooManyFailuresError
from reward_loop.limits.server import serve_limits
from reward_loop.managers import registry
from reward_loop.managers.recording import open_records
from reward_loop.records.reader import RecordsReader
from reward_loop.types import is_returned
from reward_loop.verl.reward_client import MAX_TASK_RETRIES, RewardClient
from reward_loop.verl.reward_worker import RewardWorker
from reward_loop.verl.workers import RewardWorkers
from tests.local_ray import REPOSITORY, local_ray
from tests.verl.configs import resolved as settled
from tests.verl.runs import worker_python

pytestmark = pytest.mark.integration


def rollout(text: str, **columns: Any) -> Any:
    """One rollout as verl's agent loop hands it over."""
    from verl.protocol import DataProto

    prompt = torch.tensor([tiny_tokenizer().encode("1+1=")])
    response = torch.tensor([tiny_tokenizer().encode(text)], dtype=torch.int64).reshape(1, -1)
    batch = {
        "prompts": prompt,
        "responses": response,
        "attention_mask": torch.ones(1, prompt.shape[1] + response.shape[1], dtype=torch.int64),
    }
    row = {
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0},
        "uid": "u",
        **columns,
    }
    arrays = {}
    for name, value in row.items():
        arrays[name] = np.empty(1, dtype=object)
        arrays[name][0] = value
    return DataProto(batch=TensorDict(batch, batch_size=1), non_tensor_batch=arrays)


def verl_manager(name: str, *overrides: str) -> tuple[str, ...]:
    path = Path(__file__).with_name("managers.py")
    return (f"reward_model.reward_loop_module_path={path}", f"reward_model.reward_loop_class_name={name}", *overrides)


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


@pytest.fixture(scope="module")
def policy(tiny_generative_model: Path) -> str:
    return f"actor_rollout_ref.model.path={tiny_generative_model}"


async def test_a_manager_written_for_verl_runs_unchanged(policy: str) -> None:
    worker = RewardWorker(settled(policy, *verl_manager("Length")), None)
    reward = await worker.compute_score(rollout("four"))
    assert reward["reward_score"] == 4.0
    assert reward["reward_extra_info"]["text"] == "four"
    assert reward["reward_extra_info"]["reward_outcome"] == "scored"


@pytest.mark.parametrize(("on_node", "share"), [(None, 1), (4, 2), (1, 8), (16, 1)])
def test_by_default_the_workers_of_a_node_share_its_cores(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_node: int | None, share: int
) -> None:
    monkeypatch.setattr("reward_loop.verl.managers.usable_cores", lambda: 8)
    (tmp_path / "f.py").write_text("def compute_score(solution_str): return 1.0")
    overrides = (
        f"custom_reward_function.path={tmp_path}/f.py",
        "reward.num_workers=8",
        "reward_loop.isolation=process",
    )
    worker = RewardWorker(settled(policy, *overrides), None, on_node)
    assert f"max_processes={share}," in repr(worker._manager.function)


async def test_probes_are_refused_with_a_manager_that_was_written_for_verl(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"reward_loop\.audit needs a manager of reward_loop"):
        RewardWorker(settled(policy, *verl_manager("Length"), "reward_loop.audit.share=0.1"), None)


async def test_probes_are_counted_and_labelled_answers_are_shared_by_the_workers(policy: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("async def compute_score(solution_str): return float(solution_str == '4')")
    (tmp_path / "labelled.jsonl").write_text(
        '{"solution_str": "4", "label": true}\n{"solution_str": "5", "label": false}'
    )
    overrides = (
        f"custom_reward_function.path={tmp_path}/f.py",
        "reward_loop.audit={share: 1.0, probes: [again], accept: 0.5}",
        f"reward_loop.audit.labelled={tmp_path}/labelled.jsonl",
        "reward.num_workers=2",
    )
    worker = RewardWorker(settled(policy, *overrides), None, position=1)
    assert (await worker.compute_score(rollout("4")))["reward_score"] == 1.0
    audit = worker._manager.audit
    assert audit is not None
    await audit.drain(60)
    counts = await worker.audit_counts()
    assert {kind: (count.asked, count.accepted) for kind, count in counts.probes.items()} == {
        "again": (1, 1),
        "labelled": (1, 1),
    }
    assert counts.labels == {(False, False): 1}
    assert not (await worker.audit_counts()).probes


async def test_without_an_audit_the_counts_are_empty(policy: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("async def compute_score(solution_str): return 1.0")
    worker = RewardWorker(settled(policy, f"custom_reward_function.path={tmp_path}/f.py"), None)
    assert await worker.audit_counts() == AuditCounts()


@pytest.mark.parametrize(
    ("name", "overrides", "cause"),
    [
        ("Raises", [], "ConnectionError: the sandbox is gone"),
        ("Hangs", ["reward_loop.timeout=0.01"], "TimeoutError"),
        ("NotANumber", [], "nan"),
    ],
)
async def test_an_error_in_a_manager_of_verl_is_a_failed_sample(
    policy: str, name: str, overrides: list[str], cause: str
) -> None:
    worker = RewardWorker(settled(policy, *verl_manager(name, *overrides)), None)
    info = (await worker.compute_score(rollout("four")))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert info["reward_masked"]
    assert name in info["reward_error"]
    assert cause in info["reward_error"]
    assert await worker.fatal_error() is None


async def test_its_failures_count_towards_the_bound(policy: str) -> None:
    worker = RewardWorker(settled(policy, *verl_manager("Raises", "reward_loop.min_samples_for_failed_share=2")), None)
    await worker.compute_score(rollout("four"))
    with pytest.raises(TooManyFailuresError, match="the sandbox is gone"):
        await worker.compute_score(rollout("four"))


async def test_a_manager_that_the_functions_file_registers_is_found(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))
    function = tmp_path / "f.py"
    function.write_text(REGISTERS)
    overrides = (f"custom_reward_function.path={function}", "reward_model.reward_manager=doubling")
    worker = RewardWorker(settled(policy, *overrides), None)
    assert (await worker.compute_score(rollout("4")))["reward_score"] == 2.0


async def test_verls_options_of_a_manager_take_effect(policy: str) -> None:
    overrides = (
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.max_resp_len=20",
        "+reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 10, penalty_factor: 1.0, log: true}",
    )
    worker = RewardWorker(settled(policy, *overrides), None)
    text = "1+1, so Answer: 2"
    reward = await worker.compute_score(rollout(text, data_source="math_dapo"))
    length = len(tiny_tokenizer().encode(text))
    assert 10 < length < 20
    assert reward["reward_score"] == pytest.approx(1.0 - (length - 10) / 10)
    assert reward["reward_extra_info"]["overlong"] is True


COMPONENTS = """
def accuracy(solution_str, ground_truth): return float(ground_truth in solution_str)
def brevity(solution_str): return -len(solution_str)
"""


async def test_components_are_configured_as_options(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(COMPONENTS)
    overrides = (
        "reward_model.reward_manager=composite",
        f"+reward_loop.components.accuracy={{path: {function}, name: accuracy, gate: 1}}",
        f"+reward_loop.components.brevity={{path: {function}, name: brevity, weight: 0.01}}",
    )
    worker = RewardWorker(settled(policy, *overrides), None)
    right = await worker.compute_score(rollout("1+1=2"))
    assert right["reward_score"] == pytest.approx(1.0 - 0.05)
    assert right["reward_extra_info"]["brevity"] == -5
    assert (await worker.compute_score(rollout("1+1=3")))["reward_score"] == 0.0


async def test_a_function_of_lists(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text("def compute_score(solution_strs, unit): return [unit * len(text) for text in solution_strs]\n")
    overrides = (
        "reward_model.reward_manager=batch",
        f"custom_reward_function.path={function}",
        "+custom_reward_function.reward_kwargs.unit=10",
    )
    worker = RewardWorker(settled(policy, *overrides), None)
    rewards = await asyncio.gather(*(worker.compute_score(rollout("x" * i)) for i in (1, 2, 3)))
    assert [reward["reward_score"] for reward in rewards] == [10, 20, 30]
    assert await worker.needs_group() is False
    with pytest.raises(ConfigError, match=r"needs a function of lists: set custom_reward_function\.path"):
        RewardWorker(settled(policy, "reward_model.reward_manager=batch"), None)


async def test_without_a_function_verls_rules_apply_by_data_source(policy: str) -> None:
    worker = RewardWorker(settled(policy), None)
    right = await worker.compute_score(rollout("#### 2", data_source="openai/gsm8k"))
    wrong = await worker.compute_score(rollout("#### 3", data_source="openai/gsm8k"))
    unknown = await worker.compute_score(rollout("2", data_source="nonesuch"))
    assert (right["reward_score"], wrong["reward_score"]) == (1.0, 0.0)
    assert unknown["reward_extra_info"]["reward_outcome"] == "failed"
    assert "nonesuch" in unknown["reward_extra_info"]["reward_error"]


async def test_functions_run_in_processes_if_asked_to(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text("import os\n\ndef compute_score(solution_str):\n    return float(os.getpid())\n")
    overrides = (f"custom_reward_function.path={function}", "reward_loop.isolation=process")
    for more in ((), ("reward_model.reward_manager=remote",), ("reward_model.reward_manager=prime",)):
        worker = RewardWorker(settled(policy, *overrides, *more), None)
        reward = await worker.compute_score(rollout("4"))
        assert reward["reward_extra_info"]["reward_outcome"] == "scored"
        assert reward["reward_score"] != os.getpid()


async def test_an_empty_response_and_a_missing_ground_truth(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text("def compute_score(solution_str, ground_truth): return float(solution_str == '')\n")
    worker = RewardWorker(settled(policy, f"custom_reward_function.path={function}"), None)
    assert (await worker.compute_score(rollout("")))["reward_score"] == 1.0
    info = (await worker.compute_score(rollout("2", reward_model={})))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert "ground_truth" in info["reward_error"]


POST_PROCESSES = """
class compute_score:
    def compute_score(self, solution_str):
        return None if solution_str == "?" else float(solution_str)

    def post_process_scores(self, scores):
        if 9 in scores:
            raise ValueError("nine is too much")
        return [score - max(scores) for score in scores]
"""


async def test_the_scores_of_a_group_are_post_processed(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(POST_PROCESSES)
    worker = RewardWorker(settled(policy, f"custom_reward_function.path={function}"), None)
    assert await worker.has_post_process()
    rewards = [await worker.compute_score(rollout(text)) for text in ("1", "?", "3")]
    processed = await worker.post_process(rewards, ["x_0_0", "x_1_0", "x_2_0"])
    assert [reward["reward_score"] for reward in processed] == [-2, 0, 0]
    assert [reward["reward_extra_info"]["reward_outcome"] for reward in processed] == ["scored", "unscored", "scored"]
    rewards = [await worker.compute_score(rollout(text)) for text in ("9", "?")]
    failed, unscored = await worker.post_process(rewards, ["y_0_0", "y_1_0"])
    assert failed["reward_extra_info"]["reward_masked"]
    assert "sample y_0_0" in failed["reward_extra_info"]["reward_error"]
    assert "nine is too much" in failed["reward_extra_info"]["reward_error"]
    assert unscored == rewards[1]
    assert await worker.fatal_error() is None


async def test_a_failure_of_post_processing_stops_the_run_under_the_policy_raise(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(POST_PROCESSES)
    worker = RewardWorker(
        settled(policy, f"custom_reward_function.path={function}", "reward_loop.on_failed=raise"), None
    )
    with pytest.raises(RewardLoopError, match="nine is too much"):
        await worker.post_process([await worker.compute_score(rollout("9"))], ["y_0_0"])
    assert "nine is too much" in str(await worker.fatal_error())


REJECTED: list[Any] = [
    {
        "reward_score": 9.0,
        "reward_extra_info": {
            "score": 9.0,
            "turn_level_scores": [9.0],
            "reward_outcome": "scored",
            "reward_masked": False,
            "reward_seconds": 2.0,
            "reward_attempts": 3,
        },
    }
]
PROBLEM = "the function returned 1 turn_level_scores, and the response has 2 turns"


@pytest.mark.parametrize(("on_failed", "masked", "score"), [("mask", True, 0.0), ("default", False, -1.0)])
async def test_a_reward_whose_parts_do_not_fit_obeys_the_policy(
    policy: str, on_failed: str, masked: bool, score: float
) -> None:
    options = (f"reward_loop.on_failed={on_failed}", "reward_loop.default_score=-1.0")
    worker = RewardWorker(settled(policy, *verl_manager("Length", *options)), None)
    (reward,) = await worker.reject(REJECTED, ["x_3"], [PROBLEM], accepted=3)
    assert reward["reward_score"] == score
    info = reward["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", masked)
    assert info["reward_error"] == f"sample x_3: {PROBLEM}"
    assert (info["reward_seconds"], info["reward_attempts"]) == (2.0, 3)
    assert not {"score", "turn_level_scores"} & info.keys()
    assert await worker.fatal_error() is None


async def test_a_reward_whose_parts_do_not_fit_stops_the_run_if_the_policy_is_raise(policy: str) -> None:
    worker = RewardWorker(settled(policy, *verl_manager("Length", "reward_loop.on_failed=raise")), None)
    with pytest.raises(RewardLoopError, match="sample x_3: the function returned 1 turn_level_scores"):
        await worker.reject(REJECTED, ["x_3"], [PROBLEM], accepted=0)
    assert PROBLEM in str(await worker.fatal_error())


async def test_rewards_whose_parts_do_not_fit_count_towards_the_bound_on_failures(policy: str) -> None:
    options = ("reward_loop.min_samples_for_failed_share=4", "reward_loop.max_failed_share=0.5")
    worker = RewardWorker(settled(policy, *verl_manager("Length", *options)), None)
    await worker.reject(REJECTED * 2, ["x_2", "x_3"], [PROBLEM] * 2, accepted=2)
    with pytest.raises(TooManyFailuresError, match=r"turn_level_scores.*3 of the last 5"):
        await worker.reject(REJECTED, ["x_3"], [PROBLEM], accepted=0)
    assert "3 of the last 5" in str(await worker.fatal_error())


async def test_parts_of_a_manager_written_for_verl_are_checked(policy: str) -> None:
    worker = RewardWorker(settled(policy, *verl_manager("InfiniteParts")), None)
    info = (await worker.compute_score(rollout("four")))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert "token_level_scores must be a list of finite numbers" in info["reward_error"]


POST_PROCESSES_PARTS = """
class compute_score:
    def compute_score(self, solution_str):
        return {"score": float(solution_str), "turn_level_scores": [float(solution_str)]}

    def post_process_scores(self, scores):
        raise ValueError("no")
"""


async def test_the_default_score_of_a_failed_group_has_no_parts(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(POST_PROCESSES_PARTS)
    worker = RewardWorker(
        settled(policy, f"custom_reward_function.path={function}", "reward_loop.on_failed=default"), None
    )
    reward = await worker.compute_score(rollout("2"))
    assert reward["reward_extra_info"]["turn_level_scores"] == [2.0]
    (failed,) = await worker.post_process([reward], ["x_0_0"])
    assert failed["reward_score"] == 0.0
    assert "turn_level_scores" not in failed["reward_extra_info"]


def test_post_processing_beside_a_manager_written_for_verl_is_refused(policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(POST_PROCESSES)
    overrides = verl_manager("Length", f"custom_reward_function.path={function}")
    with pytest.raises(ConfigError, match=r"post_process_scores.*Length"):
        RewardWorker(settled(policy, *overrides), None)


async def test_the_policy_raise_is_remembered_as_fatal(policy: str) -> None:
    worker = RewardWorker(settled(policy, *verl_manager("Raises", "reward_loop.on_failed=raise")), None)
    with pytest.raises(RewardLoopError, match="the sandbox is gone"):
        await worker.compute_score(rollout("four"))
    fatal = await worker.fatal_error()
    assert fatal is not None
    assert "the sandbox is gone" in fatal


def test_the_sandbox_bound_is_shared_among_the_workers(policy: str) -> None:
    from reward_loop.verl.managers import _sandbox_kwargs

    overrides = ("sandbox_fusion.url=http://x", "sandbox_fusion.max_concurrent=10", "reward.num_workers=3")
    kwargs = _sandbox_kwargs(settled(policy, *overrides))
    assert kwargs["concurrent_semaphore"]._value == 3
    assert kwargs["sandbox_fusion_url"] == "http://x"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0"}
    runtime_env = {"env_vars": environment, "py_executable": worker_python()}
    with local_ray(runtime_env=runtime_env):
        yield


KILLER = """
import os, pathlib, signal
def compute_score(solution_str, flag):
    kills, path = int(solution_str.split()[0]), pathlib.Path(flag)
    done = len(path.read_text()) if path.exists() else 0
    if done < kills:
        path.write_text("x" * (done + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


async def test_a_worker_that_dies_is_replaced_and_its_samples_are_scored_again(
    cluster: None, policy: str, tmp_path: Path
) -> None:
    function, flag = tmp_path / "f.py", tmp_path / "flag"
    function.write_text(KILLER)
    config = settled(
        policy,
        "reward.num_workers=1",
        f"custom_reward_function.path={function}",
        f"+custom_reward_function.reward_kwargs.flag={flag}",
    )
    workers = RewardWorkers(config, None)
    workers.wait_until_ready()
    once = await workers.client.compute_score.remote(rollout("1 death"))
    assert once["reward_extra_info"]["reward_outcome"] == "scored"
    always = await workers.client.compute_score.remote(rollout("99 deaths"))
    assert always["reward_extra_info"]["reward_outcome"] == "failed"
    assert f"died {MAX_TASK_RETRIES + 1} times" in always["reward_extra_info"]["reward_error"]
    flag.write_text("x" * 99)
    workers.check_fatal_errors()
    batch = [rollout(f"{i} deaths") for i in range(5)]
    rewards = await asyncio.to_thread(workers.finish_batch, workers.start_batch(batch))
    assert [reward["reward_score"] for reward in rewards] == [1.0] * 5


STARTS_ONCE = """
import os, pathlib, signal
class Judge:
    def __init__(self, folder):
        (pathlib.Path(folder) / "port").touch(exist_ok=False)

    def compute_score(self, solution_str):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("policy_of_failures", ["mask", "raise"])
async def test_a_worker_that_cannot_start_again_ends_the_run(
    cluster: None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_of_failures: str
) -> None:
    function = tmp_path / "f.py"
    function.write_text(STARTS_ONCE)
    config = settled(
        policy,
        "reward.num_workers=1",
        f"reward_loop.on_failed={policy_of_failures}",
        f"custom_reward_function.path={function}",
        "custom_reward_function.name=Judge",
        f"+custom_reward_function.reward_kwargs.folder={tmp_path}",
    )
    monkeypatch.setattr("reward_loop.verl.workers.BUSY_S", 300.0)
    workers = RewardWorkers(config, None)
    workers.wait_until_ready()
    ends = partial(pytest.raises, RewardLoopError, match="(?s)reward worker.* did not start.*FileExistsError")
    with ends():
        await workers.client.compute_score.remote(rollout("4"))
    with ends():
        workers.check_fatal_errors()
    with ends():
        workers.check_fatal_errors_briefly()
    with ends():
        await look_until_told(workers)


WAITS = """
import asyncio, pathlib, reward_loop
async def compute_score(solution_str, flag):
    async with reward_loop.limit("judge"):
        while not pathlib.Path(flag).exists():
            await asyncio.sleep(0.02)
    return 1.0
"""


async def test_limits_of_all_workers_are_changed_from_outside(cluster: None, policy: str, tmp_path: Path) -> None:
    function, flag = tmp_path / "f.py", tmp_path / "flag"
    function.write_text(WAITS)

    async def limits(*arguments: str) -> dict[str, Any]:
        # In a process of its own, as Ray prints here what workers have to say; and of these workers alone.
        command = [sys.executable, "-c", "from reward_loop.cli import main; main()", "limits", *arguments]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, *pids, "--json", "--timeout", "60"],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        # There is none before the first sample has come to a worker, nor limits where no worker had the time to answer.
        (job,) = json.loads(done.stdout or "[{}]")
        return job

    async def until(in_flight: int, waiting: int) -> None:
        async with asyncio.timeout(300):
            while True:
                job = await limits()
                judge = job["states"][0].get("limits", {}).get("judge") if job else None
                if judge and (judge["in_flight"], judge["waiting"]) == (in_flight, waiting):
                    assert address.startswith(job["job"] + ":")
                    assert len(job["processes"]) == 2
                    return

    with serve_limits(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}})) as address:
        config = settled(
            policy,
            "reward.num_workers=2",
            f"custom_reward_function.path={function}",
            f"+custom_reward_function.reward_kwargs.flag={flag}",
            "+reward_loop.limits.judge.max_concurrent=1",
            f"reward_loop.job='{address}'",
        )
        workers = RewardWorkers(config, None)
        workers.wait_until_ready()
        found = [await handle.__ray_call__.remote(lambda worker: os.getpid()) for handle in workers.handles]
        pids = [part for pid in found for part in ("--pid", str(pid))]
        calls = [asyncio.ensure_future(workers.client.compute_score.remote(rollout("x"))) for _ in range(4)]
        await until(in_flight=1, waiting=3)
        assert await limits("judge", "max_concurrent=3")
        await until(in_flight=3, waiting=1)
        flag.touch()
        assert [reward["reward_score"] for reward in await asyncio.gather(*calls)] == [1.0] * 4


HANGS = """
import threading
def compute_score(solution_str):
    if solution_str == "hang":
        threading.Event().wait()
    return 1.0
"""


def test_a_batch_whose_rewards_do_not_come_is_not_awaited_for_ever(cluster: None, policy: str, tmp_path: Path) -> None:
    import ray

    function = tmp_path / "f.py"
    function.write_text(HANGS)
    overrides = (f"custom_reward_function.path={function}", "reward.num_workers=1")
    patient = settled(policy, *overrides, "reward_loop.timeout=null")
    workers = RewardWorkers(patient, None)
    workers.wait_until_ready()
    pending = workers.start_batch([rollout("1"), rollout("hang")])
    ray.wait([sample.answer for sample in pending], num_returns=1, timeout=300)
    # As if the worker, and not the function, had forgotten a deadline of a tenth of a second.
    impatient = (
        "reward_loop.timeout=0.1",
        "reward_loop.retry.max_seconds=0.1",
        "reward_loop.worker_answer_timeout_s=5",
    )
    workers.client.options = settled(policy, *overrides, *impatient).options
    with pytest.raises(RewardLoopError, match=r"1 of 2 rewards are missing.*reward_loop\.timeout.*within 5\.2 s"):
        workers.finish_batch(pending)


@pytest.mark.parametrize(
    ("options", "by_group", "arrival_s"),
    [
        ({"timeout": 10, "retry": {"max_seconds": 5}}, False, 90),  # the restart of a worker
        ({"timeout": 10, "retry": {"max_seconds": 5}, "group": {"timeout": 900}}, True, 910),
        ({"retry": {"max_seconds": 5}, "components": {"a": {"timeout": 1800}, "b": {"timeout": 300}}}, False, 2000),
        ({"timeout": 10, "retry": {"max_seconds": 5000}, "components": {"a": {}}}, False, 5000),
    ],
)
def test_a_batch_is_awaited_as_long_as_its_slowest_sample_may_take(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], by_group: bool, arrival_s: float
) -> None:
    now = [0.0]

    async def reward() -> float:
        return 1.0

    async def wait(left: set[Any], *, timeout: float) -> tuple[set[Any], set[Any]]:
        now[0] = min(now[0] + timeout, arrival_s)
        return (left, set()) if now[0] == arrival_s else (set(), left)

    monkeypatch.setattr("reward_loop.verl.workers.asyncio.wait", wait)
    monkeypatch.setattr("reward_loop.verl.workers.time", SimpleNamespace(monotonic=lambda: now[0]))
    workers = object.__new__(RewardWorkers)
    client: Any = SimpleNamespace(options=RewardLoopConfig(**options), by_group=by_group)
    workers.client = client
    monkeypatch.setattr(workers, "check_fatal_errors", lambda: None)
    assert workers._results([reward()]) == [1.0]
    assert now[0] == arrival_s


@pytest.mark.parametrize(
    ("method", "timeout", "option"),
    [("wait_until_ready", 11, "worker_start_timeout_s"), ("check_fatal_errors", 7, "worker_answer_timeout_s")],
)
def test_the_timeouts_of_start_and_answer_are_options(
    monkeypatch: pytest.MonkeyPatch, method: str, timeout: int, option: str
) -> None:
    given: list[float] = []

    def get(answers: list[Any], *, timeout: float) -> list[Any]:
        given.append(timeout)
        raise GetTimeoutError("no answer")

    monkeypatch.setattr("reward_loop.verl.workers.ray.get", get)
    workers = object.__new__(RewardWorkers)
    workers.handles = []
    options = RewardLoopConfig(worker_start_timeout_s=11, worker_answer_timeout_s=7)
    workers.client = SimpleNamespace(options=options)  # type: ignore[assignment]
    with pytest.raises(RewardLoopError, match=rf"did not answer within {timeout} s \(reward_loop\.{option}\)"):
        getattr(workers, method)()
    assert given == [pytest.approx(timeout, abs=1)]


def test_by_default_a_worker_may_take_longer_to_answer_than_ray_takes_to_detect_a_lost_node() -> None:
    from ray._raylet import Config

    checks_s = (Config.health_check_period_ms() + Config.health_check_timeout_ms()) / 1000
    detected_s = Config.health_check_failure_threshold() * checks_s
    start_s = 30  # of the worker's replacement, on a slow machine
    assert RewardLoopConfig().worker_answer_timeout_s > detected_s + start_s


BLOCKS = """
import pathlib, time
async def compute_score(solution_str, flags):
    flags = pathlib.Path(flags)
    (flags / "blocked").touch()
    while not (flags / "free").exists():
        time.sleep(0.02)
    return 1.0
"""


async def test_a_worker_whose_event_loop_is_blocked_is_at_work_and_not_lost(
    cluster: None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function = tmp_path / "f.py"
    function.write_text(BLOCKS)
    config = settled(
        policy,
        "reward.num_workers=1",
        f"custom_reward_function.path={function}",
        f"+custom_reward_function.reward_kwargs.flags={tmp_path}",
    )
    workers = RewardWorkers(config, None)
    workers.wait_until_ready()
    reward = asyncio.ensure_future(workers.client.compute_score.remote(rollout("1")))
    await until_there(tmp_path / "blocked")
    monkeypatch.setattr("reward_loop.verl.workers.BUSY_S", 0.2)
    workers.check_fatal_errors_briefly()
    assert "1 of 1 reward workers did not answer within 0.2 s" in caplog.text
    workers.client.options = workers.client.options.model_copy(update={"worker_answer_timeout_s": 0.3})
    with pytest.raises(RewardLoopError, match=r"did not answer within 0\.3 s \(reward_loop\.worker_answer_timeout_s\)"):
        workers.check_fatal_errors()
    (tmp_path / "free").touch()
    assert (await reward)["reward_score"] == 1.0


async def until_there(path: Path) -> None:
    async with asyncio.timeout(300):
        while True:
            if path.exists():
                return
            await asyncio.sleep(0.02)


REWARDS = """
def compute_score(solution_str):
    return {"score": 1.0, "reward": 2.0, "right": True}
"""


@pytest.mark.parametrize("manager", ["naive", "verl"])
async def test_the_key_reward_does_not_get_into_verls_column_of_a_validation(
    policy: str, tmp_path: Path, manager: str
) -> None:
    function = tmp_path / "f.py"
    function.write_text(REWARDS)
    overrides = verl_manager("Rewards") if manager == "verl" else (f"custom_reward_function.path={function}",)
    worker = RewardWorker(settled(policy, *overrides, f"reward_loop.log_dir={tmp_path}/records"), None)
    validated = await worker.compute_score(rollout("4", __validate__=True, uid="v"))
    trained = await worker.compute_score(rollout("4", uid="t"))
    assert validated["reward_score"] == trained["reward_score"] == 1.0
    returned = {name: value for name, value in validated["reward_extra_info"].items() if is_returned(name)}
    assert returned == {"score": 1.0, "returned_reward": 2.0, "right": True}
    assert trained["reward_extra_info"]["reward"] == 2.0
    records = open_records(worker._options)
    assert records is not None
    assert await asyncio.to_thread(records.flush)
    rows = {row["uid"]: row["validate"] for row in RecordsReader(tmp_path / "records").rows()}
    assert rows == {"v": True, "t": False}


RANKS = """
def compute_score(solution_strs, extra_infos):
    lengths = sorted(map(len, solution_strs))
    return [lengths.index(len(text)) for text in solution_strs]
"""


async def test_abandoned_rollouts_of_a_group_do_not_join_the_new_ones(policy: str, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(solution_strs):\n    return [float(len(solution_strs))] * len(solution_strs)\n")
    overrides = (
        "reward_model.reward_manager=group",
        "reward_loop.group.timeout=300",
        f"custom_reward_function.path={file}",
    )
    worker = RewardWorker(settled(policy, *overrides, "actor_rollout_ref.rollout.n=2"), None)
    lost = asyncio.create_task(worker.compute_score(rollout("lost", uid="u")))
    other = asyncio.create_task(worker.compute_score(rollout("other", uid="w")))
    manager: Any = worker._manager
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(manager._batcher._open) == 2  # both wait for the rest of their groups
    await worker.abandon(["u", "z"])
    with pytest.raises(asyncio.CancelledError):
        await lost
    async with asyncio.timeout(60):
        again = await asyncio.gather(*(worker.compute_score(rollout(text, uid="u")) for text in ("one", "two")))
        await asyncio.gather(other, worker.compute_score(rollout("one more", uid="w")))
    assert [reward["reward_score"] for reward in again] == [2.0, 2.0]
    assert not worker._running


async def test_a_group_meets_in_one_of_several_workers(cluster: None, policy: str, tmp_path: Path) -> None:
    function = tmp_path / "f.py"
    function.write_text(RANKS)
    config = settled(
        policy,
        "reward.num_workers=2",
        "reward_model.reward_manager=group",
        "reward_loop.group.timeout=300",
        "actor_rollout_ref.rollout.n=3",
        f"custom_reward_function.path={function}",
    )
    workers = RewardWorkers(config, None)
    workers.wait_until_ready()
    rows = [rollout("x" * length, uid=f"q{q}", session_id=length) for length in (1, 2, 3) for q in range(6)]
    rows.append(rollout("x", uid="validation", group_size=1))
    rewards = await asyncio.gather(*(workers.client.compute_score.remote(row) for row in rows))
    assert [reward["reward_score"] for reward in rewards] == [0] * 6 + [1] * 6 + [2] * 6 + [0]
    batch = await asyncio.to_thread(workers.finish_batch, workers.start_batch(rows))
    assert [reward["reward_score"] for reward in batch] == [reward["reward_score"] for reward in rewards]


def test_a_batch_is_not_scored_later_because_a_rollout_of_a_group_failed(
    cluster: None, policy: str, tmp_path: Path
) -> None:
    function = tmp_path / "f.py"
    function.write_text(RANKS)
    config = settled(
        policy,
        "reward.num_workers=1",
        "reward_model.reward_manager=group",
        "reward_loop.group.timeout=300",
        "actor_rollout_ref.rollout.n=3",
        f"custom_reward_function.path={function}",
    )
    workers = RewardWorkers(config, None)
    workers.wait_until_ready()
    rows = [rollout("x" * length, uid="q", session_id=length, group_size=3) for length in (1, 3)]
    rewards = workers.finish_batch(workers.start_batch(rows))
    assert [reward["reward_extra_info"]["reward_error"] for reward in rewards] == ["", ""]
    assert [reward["reward_score"] for reward in rewards] == [0, 1]


async def test_a_worker_that_keeps_dying_stops_the_run_under_the_policy_raise(
    cluster: None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = tmp_path / "f.py"
    function.write_text(KILLER)
    config = settled(
        policy,
        "reward.num_workers=1",
        "reward_loop.on_failed=raise",
        f"custom_reward_function.path={function}",
        f"+custom_reward_function.reward_kwargs.flag={tmp_path}/flag",
    )
    monkeypatch.setattr("reward_loop.verl.reward_client.MAX_TASK_RETRIES", 1)
    workers = RewardWorkers(config, None)
    with pytest.raises(RewardFunctionError, match="died 2 times"):
        await workers.client.compute_score.remote(rollout("99 deaths"))
    with pytest.raises(RewardLoopError, match="died"):
        workers.check_fatal_errors()
    with pytest.raises(RewardLoopError, match="died"):
        await look_until_told(workers)
    monkeypatch.setattr("reward_loop.verl.workers.BUSY_S", 300.0)
    with pytest.raises(RewardLoopError, match="died"):
        workers.check_fatal_errors_briefly()


async def look_until_told(workers: RewardWorkers) -> None:
    async with asyncio.timeout(300):
        while True:
            workers.poll_fatal_errors()
            await asyncio.sleep(0.05)


def test_a_reward_worker_raises_its_limit_on_open_files(policy: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        RewardWorker(settled(policy), None)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65_536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_samples_are_dealt_out_in_turn(policy: str) -> None:
    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def compute_score(self) -> Handle:
            return self

        async def remote(self, data: Any) -> int:
            return self.number

    client = RewardClient([Handle(0), Handle(1)], settled(policy).options)
    assert [await client.compute_score.remote(None) for _ in range(4)] == [0, 1, 0, 1]
    client.by_group = True
    dealt = {uid: {await client.compute_score.remote(rollout("4", uid=uid)) for _ in range(4)} for uid in "abcdefgh"}
    assert all(len(numbers) == 1 for numbers in dealt.values())
    assert set.union(*dealt.values()) == {0, 1}
