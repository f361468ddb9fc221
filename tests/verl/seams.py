"""``python -m tests.verl.seams FOLDER``: calls the hooks of ``tools/verl-seams`` in verl with the patched files."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import sys
from contextlib import asynccontextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

FOLDER = Path(sys.argv[1])


class PatchedFirst:
    """Finds the modules of verl that have a file in the folder."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        file = FOLDER / f"{name.replace('.', '/')}.py"
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


sys.meta_path.insert(0, PatchedFirst)  # type: ignore[arg-type]

from omegaconf import OmegaConf  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput  # noqa: E402
from verl.experimental.reward_loop import reward_model  # noqa: E402
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402
from verl.workers.config.reward import RewardConfig  # noqa: E402


def trainer(**attributes: Any) -> Any:
    """A trainer that is not set up."""

    class Bare(PPOTrainerSync):
        def __init__(self) -> None:
            vars(self).update(trainer_mode="sync", global_steps=1, **attributes)

    return Bare()


def batch(*keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=list(keys), tags=[{} for _ in keys])


def reward_loop_manager_class() -> None:
    assert "reward_loop_manager_class" in {field.name for field in dataclasses.fields(RewardConfig)}
    manager = SimpleNamespace(compute_rewards=lambda batch, metrics: (batch, metrics))
    scored = trainer(reward_loop_manager=manager)._compute_reward_colocate("batch", metrics={"a": 1})
    assert scored == ("batch", {"a": 1})


def session_hooks() -> None:
    events: list[Any] = []

    class Hooks(agent_loop_tq.SessionHooks):
        @asynccontextmanager
        async def prompt(self, prompt: dict, trajectory: dict) -> Any:
            events.append(("prompt", prompt["uid"]))
            yield
            events.append("prompt ends")

        @asynccontextmanager
        async def session(self, trajectory: dict, kwargs: dict) -> Any:
            events.append(("session", kwargs["session_id"]))
            yield
            events.append("session ends")

        async def score(self, outputs: list[Any], kwargs: dict, compute_score: Any) -> None:
            assert compute_score == worker._compute_score
            events.append("score")

        async def published(self, keys: list[str], outputs: list[Any], kwargs: dict, partition_id: str) -> None:
            events.append(("published", keys, partition_id))

    class Bare(agent_loop_tq.AgentLoopWorkerTQ.__ray_actor_class__):
        def __init__(self) -> None: ...

    worker: Any = Bare()
    rollout = {"n": 1, "val_kwargs": {"n": 1}}
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    worker.session_hooks = Hooks()
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())

    async def run_agent_loop(sampling_params: dict, trajectory: dict, trace: bool, **columns: Any) -> None:
        await worker._agent_loop_postprocess(output, trajectory["validate"], **columns)

    async def nothing(*_: Any, **__: Any) -> None:
        events.append("scored by verl" if "sample_kwargs" not in __ else "teacher")

    async def put(*, key: str, tag: dict, **_: Any) -> None:
        events.append(tag["status"])

    async def put_batch(**_: Any) -> None:
        events.append("put")

    vars(worker).update(
        _run_agent_loop=run_agent_loop,
        _compute_score=nothing,
        _compute_teacher_logprobs=nothing,
        _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: ids,
    )
    row = {"uid": "u", "global_steps": 1}
    queue = SimpleNamespace(async_kv_put=put, async_kv_batch_put=put_batch)
    with patch.object(agent_loop_tq, "tq", queue):
        asyncio.run(worker._run_prompt(dict(row), {}, {"validate": False}))
        hooked = [*events]
        events.clear()
        del worker.session_hooks  # the default of the class
        asyncio.run(worker._run_prompt(dict(row), {}, {"validate": True}))
    assert hooked == [
        *(("prompt", "u"), "running", ("session", 0), "score", "teacher", "put", ("published", ["u_0_0"], "train")),
        *("session ends", "finished", "prompt ends"),
    ], hooked
    assert events == ["running", "scored by verl", "teacher", "put", "finished"], events


def step_hooks() -> None:
    done: list[str] = []

    class Hooks(trainer_base.StepHooks):
        def balance(self, trainer: Any, batch: Any, metrics: dict, balance: Any) -> Any:
            kept = [key for key in batch.keys if key != "unscored"]
            return balance(batch_of(*kept), metrics=metrics) if kept else batch_of()

        def advantage(self, trainer: Any, batch: Any, metrics: dict, compute: Any) -> Any:
            done.append(f"advantage of {len(batch.keys)}")
            return compute(batch, metrics=metrics)

    def part(name: str) -> Any:
        def call(batch: Any, metrics: dict) -> Any:
            done.append(name)
            return batch

        return call

    batch_of = batch
    config = {"actor_rollout_ref": {"rollout": {"temperature": 1.0}}, "trainer": {"critic_warmup": 0}}
    parts = ("_balance_batch", "_compute_old_log_prob", "_compute_advantage", "_update_actor")
    made = trainer(
        config=OmegaConf.create(config),
        use_critic=False,
        use_reference_policy=False,
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=[]),
        on_sample_end=lambda: None,
        **{name: part(name) for name in parts},
    )

    def keys_after_step(*keys: str) -> list[str]:
        made.replay_buffer = SimpleNamespace(sample=lambda **_: (batch(*keys), {}))
        return made._step_once({}, {}, 1).keys

    assert keys_after_step("scored", "unscored") == ["scored", "unscored"]  # without hooks
    assert done == [*parts]
    made.step_hooks = Hooks()
    done.clear()
    assert keys_after_step("scored", "unscored") == ["scored"]
    assert done == [*parts[:2], "advantage of 1", *parts[2:]]
    done.clear()
    assert keys_after_step("unscored") == []
    assert done == []


def replay_buffer_callables() -> None:
    mode: Any = OmegaConf.create({})
    buffer = replay_buffer.ReplayBuffer("sync", mode, 1, "drop", mode, 2.0, lambda count: count, "reward")
    slept: list[float] = []
    with patch.object(replay_buffer.time, "sleep", slept.append):
        buffer._wait_for_next_poll("train", 0.0)
        buffer.on_poll = lambda partition: {"train": 0.5}.get(partition)
        buffer._wait_for_next_poll("train", 0.0)
        buffer._wait_for_next_poll("val", 0.0)
    assert slept == [2.0, 0.5, 2.0]
    evicted: list[Any] = []
    buffer.on_evict = lambda partition, reasons: evicted.append((partition, reasons))
    buffer._evict_terminal_groups(1, "train", (set(), set(), set(), {}))
    assert evicted == [("train", (set(), set(), set(), {}))]
    buffer.finished_keys["train"] = {"alike", "mixed"}
    asked: list[Any] = []

    def classify(partition: str, uids: set[str]) -> dict[str, float | None]:
        asked.append((partition, uids))
        return {"alike": 1.0, "mixed": None}

    buffer.classify_groups = classify
    for _ in range(2):  # the second time, all groups are classified
        assert buffer._dapo_filtered_keys("train") == ({"alike"}, {1.0: 1})
    assert asked == [("train", {"alike", "mixed"})]


def no_router() -> None:
    config = OmegaConf.create({"rollout": {"skip_tokenizer_init": False, "free_cache_engine": False}})
    started: list[Any] = []
    cls = reward_model.RewardModelManager
    with (
        patch.object(cls, "_initialize_llm_servers", lambda self: None),
        patch.object(cls, "_initialize_router", lambda self: started.append(self)),
    ):
        assert cls(config, with_router=False).get_router_address() is None
        assert started == []
        assert started == [cls(config)]


def inflight_prompts() -> None:
    made = trainer()
    assert not trainer_base._keeps_inflight_prompts(made)
    made.keeps_inflight_prompts = True
    with patch.object(trainer_base, "tq", SimpleNamespace(kv_list=lambda partition: {"train": {}})) as queue:
        assert made._reissue_inflight_prompts() == 0
        queue.kv_list = None  # not called in the mode `sync`
        made.keeps_inflight_prompts = None
        assert made._reissue_inflight_prompts() == 0
    made.trainer_mode = "separate_async"
    assert trainer_base._keeps_inflight_prompts(made)


if __name__ == "__main__":
    assert Path(str(trainer_base.__file__)).is_relative_to(FOLDER)
    for check in (
        *(reward_loop_manager_class, session_hooks, step_hooks, replay_buffer_callables, no_router),
        inflight_prompts,
    ):
        check()
