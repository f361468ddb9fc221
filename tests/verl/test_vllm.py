"""A GRPO step of verl whose judge is a real vLLM server, in the resource pool that verl's options ask for."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from tests.verl import rewards
from tests.verl.runs import train


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_judges_a_step(tmp_path: Path, tiny_generative_model: Path, tiny_discriminative_model: Path) -> None:
    run = train(
        tmp_path,
        tiny_generative_model,
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "reward_model.enable=True",
        "reward_model.rollout.name=vllm",
        f"reward_model.model.path={tiny_discriminative_model}",
        "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=1",
        "+reward_model.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=32M",
        # Without a function, the reward is the model's logit.
        "custom_reward_function.path=null",
        function="none",
    )
    assert run.returncode == 0, run.output[-5000:]
    assert run.steps[1]["reward_loop/scored"] == 8 * 4
    scores = [row["score"] for row in run.rollouts(1)]
    assert all(map(math.isfinite, scores))
    assert len(set(scores)) > 16
    assert rewards.processes_left("vllm", str(tiny_discriminative_model)) == []
