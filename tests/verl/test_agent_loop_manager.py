"""The agent loop manager that notices dead workers, without Ray."""

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
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.tensordict_utils import get_tensordict

from reward_loop.errors import RewardLoopError
from reward_loop.verl.trainer.separate_async import QueueAgentLoopWorker
from reward_loop.verl.workers.agent_loop import RewardAgentLoopManager, RewardAgentLoopWorker
from tests.support.fork_server import module_environment, run_forked

pytestmark = pytest.mark.integration  # it imports verl


class Worker:
    """A worker that receives prompts. A call returns its result, or the error to raise."""

    def __init__(self, result: Exception | None = None) -> None:
        self.received: list[str] = []
        self.is_dead = False
        self.until_death = SimpleNamespace(remote=lambda: self)
        self.generate_sequences = SimpleNamespace(remote=self._generate)
        self._result = result

    def _generate(self, prompts: Any) -> Exception | None:
        self.received += prompts["uid"]
        return self._result


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(result: Any, timeout: float) -> None:
        assert timeout == 900, "reward_loop.worker_start_timeout_s"
        if isinstance(result, Exception):
            raise result

    def wait(calls: list[Worker], num_returns: int, timeout: float) -> Any:
        dead = [worker for worker in calls if worker.is_dead][:num_returns]
        return dead, [worker for worker in calls if worker not in dead]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)


def manager(monkeypatch: pytest.MonkeyPatch, *workers: Worker) -> RewardAgentLoopManager:
    def init(self: Any, config: Any) -> None:
        self.config = config

    async def start(self: Any) -> None:
        self.agent_loop_workers = list(workers)

    monkeypatch.setattr(AgentLoopManagerTQ, "__init__", init)
    monkeypatch.setattr(AgentLoopManagerTQ, "_init_agent_loop_workers", start)
    made = RewardAgentLoopManager(OmegaConf.create({"reward_loop": {"worker_start_timeout_s": 900.0}}))
    asyncio.run(made._init_agent_loop_workers())
    return made


def prompts(uids: str) -> Any:
    return get_tensordict({"uid": np.array(list(uids), dtype=object)})


def test_prompts_are_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [Worker(), Worker(), Worker()]
    of_three = manager(monkeypatch, *workers)
    of_three.generate_sequences(prompts("abcde"))
    of_three.generate_sequences(prompts("f"))
    assert [worker.received for worker in workers] == [["a", "b", "f"], ["c", "d"], ["e"]]
    of_three.check_workers()


def test_the_error_of_a_dead_worker_names_it_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [Worker(), Worker()]
    of_both = manager(monkeypatch, *workers)
    workers[1].is_dead = True
    with pytest.raises(RewardLoopError, match=r"agent loop worker 1 died: .*memory\? Run the same command again"):
        of_both.check_workers()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ActorDiedError(), "agent loop worker 1 died"),
        (OutOfMemoryError("killed by Ray"), "agent loop worker 1 died"),
        (
            GetTimeoutError(),
            r"worker 1 did not receive its prompts within 900 s \(reward_loop.worker_start_timeout_s\)",
        ),
    ],
)
def test_a_worker_that_does_not_receive_its_prompts_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    with pytest.raises(RewardLoopError, match=message):
        manager(monkeypatch, Worker(), Worker(error)).generate_sequences(prompts("abcd"))


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
