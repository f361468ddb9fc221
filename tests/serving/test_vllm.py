"""Real vLLM servers on the CPU, started once."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager
from tests.serving.real_engines import FORKING, HELLO, IN_THE_ENGINE_PROCESS, RealEngine, config_of, judge_url, url_of
from tests.support.servers import CHAT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MAX_NEW_TOKENS = 200
"""The longest reply of the judge's server, whatever a request asks for."""


@pytest.fixture(scope="module")
def engine_config(
    tiny_generative_model: Path, tiny_discriminative_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RewardModelConfig:
    return config_of(
        tiny_generative_model,
        tiny_discriminative_model,
        tmp_path_factory.mktemp("logs"),
        {"override_generation_config": {"temperature": 0.0, "top_k": -1, "max_new_tokens": MAX_NEW_TOKENS}},
        engine="vllm",
        device="cpu",
        max_model_len=256,
        env=IN_THE_ENGINE_PROCESS | FORKING,
        engine_args={"kv_cache_memory_bytes": "32M", "max_num_seqs": 16},
    )


class TestVllm(RealEngine):
    streamed: ClassVar = {"max_tokens": 8}
    child = "EngineCor"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_client_that_leaves_stops_the_engine(self, models: RewardModelManager, stream: bool) -> None:
        metrics = await judge_url(models) + "/metrics"
        async with aiohttp.ClientSession(url_of(models)) as session:

            async def metric(name: str) -> float:
                async with session.get(metrics) as response:
                    lines = (await response.text()).splitlines()
                return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

            async def chat() -> None:
                body = {"model": "judge", "messages": HELLO, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
                body |= {"n": 16, "temperature": 1.0, "stream": stream}
                async with session.post(CHAT, json=body, raise_for_status=True) as response:
                    await response.read()

            async with asyncio.timeout(60):
                tokens = 16 * MAX_NEW_TOKENS
                while tokens == 16 * MAX_NEW_TOKENS:  # the engine may be done before the client leaves
                    before = await metric("generation_tokens_total")
                    asking = asyncio.create_task(chat())
                    while await metric("generation_tokens_total") == before:
                        pass
                    asking.cancel()
                    while await metric("num_requests_running"):
                        pass
                    tokens = await metric("generation_tokens_total") - before
            assert 0 < tokens < 16 * MAX_NEW_TOKENS
