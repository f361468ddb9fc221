"""Real SGLang servers on the CPU: a generative and a discriminative model behind one router, started once.

SGLang needs an environment of its own, which `make sglang` makes. On a CPU, a sleeping server is paused, but keeps its
memory.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import pytest_asyncio
from pydantic import BaseModel

from reward_loop.client import Json, Judge, chat_complete, classify, score
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import RequestError
from reward_loop.serving import RewardModelManager
from tests.gsm8k import ROOT
from tests.servers import Watched, post
from tests.serving.running import below, running

openai = pytest.importorskip("openai")

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

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXTS = ["a", "an answer", "twelve plus thirty is forty-two", "12+30=42", "\n"]
MAX_MODEL_LEN = 512
CHAT = "/v1/chat/completions"


def _other_models() -> str:
    """Return SGLang's modules of all models except Qwen2. Importing them takes each process 4 s of CPU time."""
    (folder,) = (ENVIRONMENT / "lib").glob("python*/site-packages/sglang/srt/models")
    return ",".join(path.stem for path in folder.iterdir() if path.stem not in ("qwen2", "qwen2_classification"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(
    tiny_generative_model: Path, tiny_discriminative_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RewardModelManager]:
    options: dict[str, Any] = {
        "engine": "sglang",
        "python": str(ENVIRONMENT / "bin" / "python"),
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "start_timeout_s": 600,
        "env": {"SGLANG_DISABLED_MODEL_ARCHS": _other_models()},
        # Without the last option, a random model may spend all its tokens on the spaces that JSON allows.
        "engine_args": {"device": "cpu", "max_total_tokens": 4096, "constrained_json_disable_any_whitespace": True},
    }
    judge = options | {"engine_args": options["engine_args"] | {"enable_metrics": True}}
    config = RewardModelConfig(
        models={
            "judge": ServedModelConfig(model_path=str(tiny_generative_model), **judge),
            "scorer": ServedModelConfig(model_path=str(tiny_discriminative_model), **options),
        },
        log_dir=str(tmp_path_factory.mktemp("logs")),
    )
    async with running(config) as manager:
        yield manager


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(models: RewardModelManager) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=_url(models) + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def _url(models: RewardModelManager) -> str:
    return f"http://{models.reward_router_address}"


async def _post(url: str, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = await post(url, path, data, headers={"content-type": "application/json"})
    return status, json.loads(answer or "null")


async def _classify(models: RewardModelManager, text: Any) -> tuple[int, Any]:
    return await _post(_url(models), "/classify", {"model": "scorer", "text": text})


async def _workers(models: RewardModelManager) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(_url(models)) as session, session.get("/workers") as response:
        workers: list[dict[str, Any]] = await response.json()
        return workers


async def test_real_sglang_chats(client: Any) -> None:
    answer = await client.chat.completions.create(model="judge", messages=HELLO, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8
    assert {model.id async for model in client.models.list()} == {"judge", "scorer"}


async def test_real_sglang_streams_output_that_a_regular_expression_restricts(client: Any) -> None:
    request: dict[str, Any] = {"model": "judge", "messages": HELLO, "max_tokens": 16, "temperature": 0}
    request["extra_body"] = {"regex": "[a-z]{8}"}
    whole = (await client.chat.completions.create(**request)).choices[0].message.content
    assert re.fullmatch("[a-z]{8}", whole)
    stream = await client.chat.completions.create(**request, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == whole


async def test_real_sglang_reports_the_usage_of_a_stream(client: Any) -> None:
    request: dict[str, Any] = {"model": "judge", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    *_, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert 1 <= last.usage.completion_tokens <= 8


async def test_a_client_that_leaves_a_stream_stops_real_sglang(models: RewardModelManager) -> None:
    # SGLang looks every four seconds for clients that have left a reply that is not streamed.
    (judge,) = [worker["url"] for worker in await _workers(models) if "judge" in worker["models"]]
    body = {"model": "judge", "messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(_url(models)) as session:

        async def tokens() -> float:
            async with session.get(judge + "/metrics/") as response:
                lines = (await response.text()).splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:generation_tokens_total{"))

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


async def test_real_sglang_returns_the_log_probabilities_of_its_tokens(models: RewardModelManager) -> None:
    reply = await chat_complete(
        models.reward_router_address, HELLO, model="judge", max_tokens=4, temperature=0, logprobs=True
    )
    assert reply.logprobs is not None
    assert len(reply.logprobs) == reply.usage.completion_tokens
    assert reply.cut_off == (reply.usage.completion_tokens == 4)


async def test_real_sglang_has_the_logits_of_transformers(
    models: RewardModelManager, tiny_discriminative_model: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_discriminative_model)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_discriminative_model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in TEXTS]
    logits = [await classify(models.reward_router_address, text, model="scorer") for text in TEXTS]
    assert logits == pytest.approx(expected, abs=1e-4)
    status, answer = await _classify(models, TEXTS)
    assert status == 200, answer
    assert [entry["embedding"][0] for entry in answer] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01


async def test_real_sglang_restricts_output_to_a_json_schema(models: RewardModelManager) -> None:
    class Grade(BaseModel):
        score: Literal[0, 1]

    judge = Judge("Rate {{answer}}", Json(Grade, enforce=True), model="judge", max_tokens=64)
    assert (await judge(models.reward_router_address, answer="4")).score in (0, 1)


async def test_real_sglang_ranks_documents(models: RewardModelManager) -> None:
    scores = await score(models.reward_router_address, "12+30=", ["42", "a"], model="scorer")
    assert len(set(scores)) == 2


async def test_real_sglang_rejects_bad_requests(models: RewardModelManager) -> None:
    before = models.pids()
    url, judge = _url(models), (await _workers(models))[0]["url"]
    chat = {"model": "judge", "messages": HELLO, "max_tokens": 2}
    status, body = await _post(judge, CHAT, b'{"model": ')
    assert (status, body["object"]) == (400, "error")
    status, body = await _post(url, CHAT, chat | {"temperature": -1})
    assert (status, body["object"], "temperature" in body["message"]) == (400, "error", True)
    status, body = await _classify(models, 5)
    assert (status, body["object"]) == (400, "error")
    status, body = await _post(url, "/classify", {"model": "scorer", "messages": HELLO})
    assert (status, "text" in body["error"]["message"]) == (400, True)
    status, body = await _classify(models, "x" * 2 * MAX_MODEL_LEN)
    assert (status, "context length" in body["error"]["message"]) == (400, True)
    with pytest.raises(RequestError, match="context length") as long:
        await chat_complete(models.reward_router_address, "x" * 2 * MAX_MODEL_LEN, model="judge")
    assert (long.value.status, long.value.transient) == (400, False)
    # SGLang answers requests for other models.
    assert (await _post(judge, CHAT, chat | {"model": "nonesuch"}))[0] == 200
    assert models.pids() == before


async def test_the_router_rejects_what_real_sglang_would_answer_or_die_of(models: RewardModelManager) -> None:
    before = models.pids()
    url = _url(models)
    for path, body, status in (
        (CHAT, b'{"model": ', 400),
        (CHAT, {"model": "nonesuch", "messages": HELLO}, 404),
        (CHAT, {"model": "scorer", "messages": HELLO}, 400),
        ("/classify", {"model": "judge", "text": "a"}, 400),
        ("/classify", {"model": "scorer", "text": ""}, 400),
    ):
        answer = await _post(url, path, body)
        assert (answer[0], answer[1]["error"]["type"]) == (status, "RouterError"), (path, body)
    assert models.pids() == before


async def test_a_killed_scheduler_of_real_sglang_is_replaced_and_requests_survive(models: RewardModelManager) -> None:
    before = models.pids()
    children = below(before["server 2"])
    [scheduler] = [child for child in children if child.name().startswith("sglang::sched")]
    watched = Watched([child.pid for child in children])
    requests = [asyncio.create_task(_classify(models, text)) for text in TEXTS]
    scheduler.kill()
    requests += [asyncio.create_task(_classify(models, text)) for text in TEXTS]
    answers = await asyncio.gather(*requests)
    assert [status for status, _ in answers] == [200] * len(answers)
    after = models.pids()
    assert after["server 1"] == before["server 1"]
    assert after["server 2"] != before["server 2"]
    assert watched.left_after() == 0
    watched.close()
    assert (await chat_complete(models.reward_router_address, HELLO, model="judge", max_tokens=2)).usage is not None
