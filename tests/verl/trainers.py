"""Our trainer of a mode, constructed and set up as in a run, without verl's workers and without Ray."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError
from reward_loop.verl.options import ModeOptions, RewardSettings
from reward_loop.verl.run.services import RewardServices
from reward_loop.verl.trainer import reward_loop_trainer as trainer
from reward_loop.verl.trainer.reward_loop_trainer import with_reward_loop
from reward_loop.verl.workers import reward_workers as workers
from reward_loop.verl.workers.reward_workers import RewardWorkers
from tests.verl.configs import resolved


class Workers(SimpleNamespace):
    """Stands where the reward workers are: none has an error, or anything to report. Attributes replace methods."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(**{"client": SimpleNamespace(by_group=False), **changed})

    def nothing(self, *_: Any) -> None: ...

    wait_until_ready = stop = nothing


class NoJob:
    """Stands where the job's actor is: nothing stops the run, and nothing was used."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.spent = 0.0, 0.0
        self.name = "no job"
        self.failures: list[str] = []
        self.lost: list[str] = []
        self.handle = SimpleNamespace(
            **{name: SimpleNamespace(remote=getattr(self, name)) for name in ("stop", "lose", "count_failure")}
        )

    async def stop(self, why: str) -> None:
        self.why = self.why or why

    async def lose(self, worker: str, quiet_s: float) -> None:
        self.lost.append(worker)

    async def count_failure(self, error: str, cause: str) -> None:
        self.failures.append(cause)

    def check(self) -> None:
        if self.why is not None:
            raise RewardLoopError(self.why)

    def usage(self) -> tuple[float, float]:
        return self.spent

    def spend(self, cost: float, tokens: float) -> None:
        self.spent = self.spent[0] + cost, self.spent[1] + tokens

    def exchange_counts(self) -> dict[str, Any]:
        return {"calls": 0, "without_verdict": 0, "seconds": []}


def reward_workers(monkeypatch: pytest.MonkeyPatch, options: RewardLoopConfig, *handles: Any) -> RewardWorkers:
    """The reward workers of a run with these handles, without Ray."""
    left = iter(handles)
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(left)))
    monkeypatch.setattr(workers.ray, "remote", lambda cls: actor)
    monkeypatch.setattr(workers, "worker_nodes", lambda count: [f"{0:056x}"] * len(handles))
    settings: Any = SimpleNamespace(num_workers=len(handles), options=options, model=None, mode=ModeOptions("sync"))
    job: Any = NoJob()
    return RewardWorkers(settings, None, job)


@functools.cache
def _default_settings() -> RewardSettings:
    return resolved()


def constructed(
    settings: RewardSettings | None = None, verl: type[PPOTrainer] = PPOTrainerSync, **services: Any
) -> Any:
    """A trainer before verl sets it up. ``services`` are further fields of `RewardServices`."""
    settings = settings or _default_settings()
    return with_reward_loop(verl)(settings.config, RewardServices(settings, **{"job": NoJob(), **services}))


def set_up(monkeypatch: pytest.MonkeyPatch, made: Any, rewards: Any = None, step: int = 1) -> Any:
    """Set a trainer up, without verl's part, which starts workers. ``rewards`` stands where the reward workers are."""
    monkeypatch.setattr(trainer, "RewardWorkers", lambda *_, **__: rewards or Workers())
    for cls in type(made).__mro__:
        if issubclass(cls, PPOTrainer) and not issubclass(cls, trainer.RewardLoopTrainer) and "_setup" in vars(cls):
            monkeypatch.setattr(cls, "_setup", lambda self: None)
    made.actor_rollout_wg = SimpleNamespace(update_actor=lambda batch: batch, _dispatch_info={"actor": [0]})
    made.tokenizer, made.total_training_steps = SimpleNamespace(decode=str), 7
    made.use_critic = False
    made._setup()
    made.global_steps, made.timing_raw = step, {}
    return made
