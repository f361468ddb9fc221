"""The agent loop manager that replaces dead workers, without Ray."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import assign_non_tensor, get_tensordict

from reward_loop.errors import RewardLoopError
from reward_loop.verl import agent_loop_manager
from reward_loop.verl.agent_loop import RewardAgentLoopWorker
from reward_loop.verl.agent_loop_manager import MAX_DEATHS, MAX_STARTS, Assignments, RewardAgentLoopManager
from reward_loop.verl.separate_async import QueueAgentLoopWorker
from tests.fork_server import module_environment, run_forked

pytestmark = pytest.mark.integration  # it imports verl


class Worker:
    """A worker that is dead, or that receives prompts."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead
        self.received: list[tuple[list[str], int]] = []
        self.generate_sequences = SimpleNamespace(remote=self._generate)
        self.until_death = SimpleNamespace(remote=lambda: "never")
        self.__ray_ready__ = SimpleNamespace(remote=lambda: ActorDiedError() if dead else None)

    def _generate(self, prompts: Any) -> Any:
        if self.dead:
            return ActorDiedError()
        self.received.append((list(prompts["uid"]), prompts["global_steps"]))
        return None


def prompts(uids: str, step: int = 1) -> Any:
    batch = get_tensordict({"uid": np.array(list(uids), dtype=object), "index": np.arange(len(uids)).astype(object)})
    assign_non_tensor(batch, global_steps=step)
    return batch


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The killed workers. Calls return their results, or the errors to raise."""
    killed: list[Any] = []

    def get(result: Any, timeout: float | None = None) -> Any:
        if isinstance(result, Exception):
            raise result
        if result == "hangs":
            assert timeout == 900, "reward_loop.worker_start_timeout_s"
            raise GetTimeoutError
        return result

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(agent_loop_manager, "unfinished_prompts", lambda: {"train": set("abcdefg"), "val": {"h"}})
    return killed


def manager(monkeypatch: pytest.MonkeyPatch, *workers: Worker, replacements: list[Worker] | None = None) -> Any:
    def init(self: Any, config: Any) -> None:
        self.config, self.reward_loop_worker_handles = config, []
        self.llm_client = self.teacher_client = None

    async def start(self: Any) -> None:
        self.agent_loop_workers = list(workers)

    monkeypatch.setattr(AgentLoopManagerTQ, "__init__", init)
    monkeypatch.setattr(AgentLoopManagerTQ, "_init_agent_loop_workers", start)
    monkeypatch.setattr(agent_loop_manager, "worker_nodes", lambda count: [f"{0:056x}"] * count)
    manager: Any = RewardAgentLoopManager(OmegaConf.create({"reward_loop": {"worker_start_timeout_s": 900.0}}))
    new = iter(replacements or [])
    manager.agent_loop_workers_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(new)))
    asyncio.run(manager._init_agent_loop_workers())
    return manager


def test_prompts_are_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch, killed: list[Any]) -> None:
    first, second = Worker(), Worker()
    of_both = manager(monkeypatch, first, second)
    of_both.generate_sequences(prompts("abcde"))
    assert (first.received, second.received) == ([(["a", "b", "c"], 1)], [(["d", "e"], 1)])
    assert of_both.prompts_of([1]) == {"d", "e"}
    assert list(of_both.prompt("d")["uid"]) == ["d"]
    assert not killed


def test_finished_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch, killed: list[Any]) -> None:
    one = manager(monkeypatch, Worker())
    one.generate_sequences(prompts("xya"))
    one.generate_sequences(prompts("b"))
    assert one.prompts_of([0]) == {"a", "b"}


def test_prompts_that_a_dead_worker_did_not_receive_are_sent_to_its_replacement(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    alive, dead, new = Worker(), Worker(dead=True), Worker()
    replacing = manager(monkeypatch, alive, dead, replacements=[new])
    replacing.generate_sequences(prompts("abcd"))
    assert alive.received == [(["a", "b"], 1)]
    assert killed == [dead]  # so that its death is detected even if it was only unreachable
    replacing.replace([1], timeout_s=60)
    assert replacing.agent_loop_workers == [alive, new]
    replacing.send_again(sorted(replacing.prompts_of([1])), step=3)
    assert new.received == [(["c"], 3), (["d"], 3)]


def test_a_worker_that_does_not_receive_its_prompts_in_time_is_killed(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    alive, hung = Worker(), Worker()
    hung.generate_sequences = SimpleNamespace(remote=lambda prompts: "hangs")
    of_both = manager(monkeypatch, alive, hung)
    of_both.generate_sequences(prompts("abcd"))
    assert alive.received == [(["a", "b"], 1)]
    assert killed == [hung]


def test_a_replacement_that_dies_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    dead = [Worker(dead=True) for _ in range(MAX_STARTS)]
    good = Worker()
    replacing = manager(monkeypatch, Worker(), replacements=[*dead[1:], good])
    replacing.replace([0], timeout_s=60)
    assert replacing.agent_loop_workers == [good]
    hopeless = manager(monkeypatch, Worker(), replacements=dead)
    with pytest.raises(RewardLoopError, match=f"replacement died {MAX_STARTS} times while it started"):
        hopeless.replace([0], timeout_s=60)


def test_a_replacement_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, killed: list[Any]) -> None:
    slow = Worker()
    slow.__ray_ready__ = SimpleNamespace(remote=lambda: GetTimeoutError())
    with pytest.raises(RewardLoopError, match=r"did not start within 60 s \(reward_loop\.worker_start_timeout_s\)"):
        manager(monkeypatch, Worker(), replacements=[slow]).replace([0], timeout_s=60)


OTHER_PROCESS = """
import inspect, pathlib
from ray import cloudpickle

for cls in cloudpickle.loads(pathlib.Path("classes").read_bytes()):
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        method = inspect.unwrap(method)
        cells = dict(zip(method.__code__.co_freevars, method.__closure__ or ()))
        if "__class__" in cells and cells["__class__"].cell_contents not in cls.__mro__:
            print(f"{cls.__mro__[1].__name__}.{name}: super() fails")
"""


def test_the_workers_work_in_the_processes_of_ray(tmp_path: Path) -> None:
    # Ray copies the methods that a class inherits into a subclass, and sends those of verl's actor class by value. A
    # copy that uses super() would refer to a copy of verl's class, which is not a base class of the worker.
    workers = (RewardAgentLoopWorker, QueueAgentLoopWorker)
    classes = [ray.remote(worker).__ray_metadata__.modified_class for worker in workers]
    (tmp_path / "classes").write_bytes(cloudpickle.dumps(classes))
    (tmp_path / "other_process.py").write_text(OTHER_PROCESS)
    path = os.pathsep.join([str(tmp_path), module_environment()["PYTHONPATH"]])
    status = run_forked(["other_process"], {**os.environ, "PYTHONPATH": path}, tmp_path, tmp_path / "log")
    printed = (tmp_path / "log").read_text()
    assert status == 0, printed
    assert "super() fails" not in printed


def assigned() -> Assignments:
    assignments = Assignments()
    assignments.assign(0, ["A", "B"], ["a", "b"])
    assignments.assign(1, ["C"], ["c"])
    return assignments


def test_the_prompts_of_a_worker_are_found_with_their_data() -> None:
    assignments = assigned()
    assert assignments.of([0]) == {"a", "b"}
    assert assignments.of([0, 1]) == {"a", "b", "c"}
    assert assignments.of([2]) == set()
    assert assignments.get("b") == (0, ["B"])
    assert assignments.get("c") == (1, ["C"])


def test_finished_prompts_are_not_kept() -> None:
    assignments = assigned()
    assignments.keep({"b", "z"})
    assert assignments.of([0, 1]) == {"b"}


def test_a_prompt_whose_workers_die_again_and_again_is_an_error_that_names_it() -> None:
    assignments = assigned()
    for _ in range(MAX_DEATHS):
        assignments.count_deaths({"a"})
    assignments.count_deaths({"b", "c"})
    with pytest.raises(RewardLoopError, match=f"{MAX_DEATHS + 1} agent loop workers died .* prompt a: does the agent"):
        assignments.count_deaths({"a", "b"})
    for _ in range(MAX_DEATHS - 2):
        assignments.count_deaths({"b"})
    with pytest.raises(RewardLoopError, match="prompt a and 1 other prompts"):
        assignments.count_deaths({"a", "b", "c"})
