"""Real SGLang servers on the CPU, started once.

SGLang needs an environment of its own, which `make sglang` makes. On a CPU, a sleeping server is paused, but keeps its
memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager
from tests.serving.real_engines import FORKING, HELLO, RealEngine, config_of, judge_url, url_of
from tests.support.gsm8k import ROOT
from tests.support.servers import CHAT

ENVIRONMENT = ROOT / ".venv-sglang"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        # The stamp is written last.
        not (ENVIRONMENT / "reward-loop.stamp").exists(),
        reason="SGLang's environment .venv-sglang is missing: run `make sglang`",
    ),
]


def _other_models() -> str:
    """Return SGLang's modules of all models except Qwen2. Importing them takes each process 4 s of CPU time."""
    (folder,) = (ENVIRONMENT / "lib").glob("python*/site-packages/sglang/srt/models")
    return ",".join(path.stem for path in folder.iterdir() if path.stem not in ("qwen2", "qwen2_classification"))


@pytest.fixture(scope="module")
def engine_config(
    tiny_generative_model: Path, tiny_discriminative_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> RewardModelConfig:
    return config_of(
        tiny_generative_model,
        tiny_discriminative_model,
        tmp_path_factory.mktemp("logs"),
        {"enable_metrics": True},
        engine="sglang",
        python=str(ENVIRONMENT / "bin" / "python"),
        max_model_len=512,
        env={"SGLANG_DISABLED_MODEL_ARCHS": _other_models()} | FORKING,
        # Without the last option, a random model may spend all its tokens on the spaces that JSON allows.
        device="cpu",
        engine_args={"max_total_tokens": 4096, "constrained_json_disable_any_whitespace": True},
    )


class TestSglang(RealEngine):
    streamed: ClassVar = {"max_tokens": 16, "extra_body": {"regex": "[a-z]{8}"}}
    # SGLang would answer the first one, and die of the second one.
    rejected: ClassVar = [
        ("/classify", {"model": "judge", "text": "a"}, 400),
        ("/classify", {"model": "scorer", "text": ""}, 400),
    ]
    child = "sglang::sched"

    async def test_a_client_that_leaves_a_stream_stops_the_engine(self, models: RewardModelManager) -> None:
        # SGLang looks every four seconds for clients that have left a reply that is not streamed.
        judge = await judge_url(models)
        body = {"model": "judge", "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession(url_of(models)) as session:

            async def tokens() -> float:
                async with session.get(judge + "/metrics/") as response:
                    lines = (await response.text()).splitlines()
                generated = [line for line in lines if line.startswith("sglang:generation_tokens_total{")]
                return sum(float(line.split()[-1]) for line in generated)

            async def running() -> int:
                async with session.get(judge + "/v1/loads") as response:
                    return sum(rank["num_running_reqs"] for rank in (await response.json())["loads"])

            async with asyncio.timeout(60):
                generated = 400.0
                while generated >= 400:  # the engine may be done before the client leaves
                    before = await tokens()
                    response = await session.post(CHAT, json=body, raise_for_status=True)
                    assert (await response.content.readline()).startswith(b"data: ")
                    response.close()
                    while await running():
                        pass
                    generated = await tokens() - before
