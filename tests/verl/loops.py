"""Agent loops for runs of verl's trainer, named in loops.yaml."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import ray
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Seeded(SingleTurnAgentLoop):
    """Samples the same response wherever prompt, session, training step and weights are the same."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        name = f"{kwargs['raw_prompt']} {kwargs['session_id']} {kwargs['global_steps']}"
        sampling = {**sampling_params, "seed": zlib.crc32(name.encode()), "max_tokens": 12}
        return await super().run(sampling, priority, **kwargs)


class Uneven(Seeded):
    """Fails wholly on some prompts; on others in one session; and on yet others one session has two outputs."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        kind, first = kwargs["index"] % 5, kwargs["session_id"] == 0
        if kind == 0 or (kind == 1 and first):
            raise RuntimeError("this rollout fails, as it should")
        output = await super().run(sampling_params, priority, **kwargs)
        if kind == 2 and first:
            return [output, await super().run(sampling_params, priority, **kwargs)]
        return output


class Timed(SingleTurnAgentLoop):
    """Writes down from when to when it generated, and whether the reward model slept then."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        models = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith("cpu_reward_server")]
        began, before = time.time(), [await model.is_sleeping.remote() for model in models]
        output = await super().run(sampling_params, priority, **kwargs)
        after = [await model.is_sleeping.remote() for model in models]
        times = {"began": began, "ended": time.time(), "model_slept": len(models) == 1 and all(before + after)}
        with Path(os.environ["REWARD_LOG"]).with_name("generations.jsonl").open("a") as file:
            file.write(json.dumps(times) + "\n")
        return output
