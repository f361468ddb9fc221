"""Real vLLM servers on the CPU: a generative and a discriminative model behind one router, started once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil
import pytest
import pytest_asyncio
from pydantic import BaseModel

from reward_loop.client import Json, Judge, Number, chat_complete, classify, score
from reward_loop.client.expected import expected_score
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import RequestError
from reward_loop.serving import RewardModelManager
from tests.servers import Watched, post
from tests.serving.running import below, running

openai = pytest.importorskip("openai")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXTS = ["a", "an answer", "twelve plus thirty is forty-two", "12+30=42", "\n"]
MAX_MODEL_LEN = 256
MAX_NEW_TOKENS = 200
"""The longest reply of the judge's server, whatever a request asks for."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(
    tiny_generative_model: Path, tiny_discriminative_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RewardModelManager]:
    options: dict[str, Any] = {
        "engine": "vllm",
        "max_model_len": MAX_MODEL_LEN,
        "dtype": "float32",
        "start_timeout_s": 600,
        "engine_args": {"kv_cache_memory_bytes": "32M", "max_num_seqs": 16},
    }
    judge = options | {
        "engine_args": options["engine_args"]
        | {"override_generation_config": {"temperature": 0.0, "top_k": -1, "max_new_tokens": MAX_NEW_TOKENS}}
    }
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
    url = f"http://{models.reward_router_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def _url(models: RewardModelManager) -> str:
    return f"http://{models.reward_router_address}"


async def _classify(models: RewardModelManager, **body: Any) -> tuple[int, Any]:
    status, answer = await post(
        _url(models), "/classify", json.dumps({"model": "scorer", "use_activation": False, **body}).encode(), **JSON
    )
    return status, json.loads(answer)


JSON: dict[str, Any] = {"headers": {"content-type": "application/json"}}


async def test_the_openai_client_chats(client: Any) -> None:
    answer = await client.chat.completions.create(model="judge", messages=HELLO, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8
    assert {model.id async for model in client.models.list()} == {"judge", "scorer"}


async def test_a_stream_arrives_in_parts_with_the_same_text(client: Any) -> None:
    request: dict[str, Any] = {"model": "judge", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = await client.chat.completions.create(**request)
    stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(parts) > 2
    assert "".join(parts) == (whole.choices[0].message.content or "")
    assert (last.choices, last.usage) == ([], whole.usage)


async def test_sampling_defaults_of_the_server(client: Any) -> None:
    request: dict[str, Any] = {"model": "judge", "messages": HELLO, "max_tokens": 8}
    greedy = await client.chat.completions.create(**request, temperature=0)
    default = await client.chat.completions.create(**request)
    assert default.choices[0].message.content == greedy.choices[0].message.content
    request |= {"max_tokens": MAX_NEW_TOKENS + 20, "extra_body": {"ignore_eos": True}}
    longest = await client.chat.completions.create(**request)
    assert longest.usage.completion_tokens == MAX_NEW_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_engine(models: RewardModelManager, stream: bool) -> None:
    async with aiohttp.ClientSession(_url(models)) as session:
        async with session.get("/workers") as response:
            (judge,) = [worker["url"] for worker in await response.json() if "judge" in worker["models"]]

        async def metric(name: str) -> float:
            async with session.get(judge + "/metrics") as response:
                lines = (await response.text()).splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

        async def ask() -> None:
            body = {"model": "judge", "messages": HELLO, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
            body |= {"n": 16, "temperature": 1.0, "stream": stream}
            async with session.post("/v1/chat/completions", json=body, raise_for_status=True) as response:
                await response.read()

        async with asyncio.timeout(60):
            tokens = 16 * MAX_NEW_TOKENS
            while tokens == 16 * MAX_NEW_TOKENS:  # the engine may be done before the client leaves
                before = await metric("generation_tokens_total")
                asking = asyncio.create_task(ask())
                while await metric("generation_tokens_total") == before:
                    pass
                asking.cancel()
                while await metric("num_requests_running"):
                    pass
                tokens = await metric("generation_tokens_total") - before
        assert 0 < tokens < 16 * MAX_NEW_TOKENS


async def test_structured_output(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="judge", messages=HELLO, max_tokens=16, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")


async def test_the_logits_are_those_of_transformers(
    models: RewardModelManager, tiny_discriminative_model: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_discriminative_model)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_discriminative_model, dtype=torch.float32).eval()
    chat = tokenizer.apply_chat_template(HELLO, tokenize=False)
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in [*TEXTS, chat]]
    status, answer = await _classify(models, input=TEXTS)
    assert status == 200, answer
    logits = [entry["probs"][0] for entry in answer["data"]]
    status, answer = await _classify(models, messages=HELLO)
    assert status == 200, answer
    assert [*logits, answer["data"][0]["probs"][0]] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01


async def test_the_librarys_own_client(models: RewardModelManager) -> None:
    address = models.reward_router_address
    reply = await chat_complete(address, HELLO, model="judge", max_tokens=4, temperature=0, logprobs=True)
    assert reply.logprobs is not None
    assert len(reply.logprobs) == reply.usage.completion_tokens
    assert reply.cut_off == (reply.usage.completion_tokens == 4)
    for text in (TEXTS[1], HELLO):
        _, answer = await _classify(models, **({"input": text} if isinstance(text, str) else {"messages": text}))
        assert await classify(address, text, model="scorer") == pytest.approx(answer["data"][0]["probs"][0])
    ranked = await score(address, "12+30=", ["42", "a"], model="scorer")
    assert len(ranked) == 2
    with pytest.raises(RequestError, match="maximum context length") as long:
        await chat_complete(address, "x" * 2 * MAX_MODEL_LEN, model="judge")
    assert (long.value.status, long.value.transient) == (400, False)


async def test_a_judge(models: RewardModelManager) -> None:
    class Grade(BaseModel):
        score: Literal[0, 1]

    address = models.reward_router_address
    choices = {"choice": ["Score: 1", "Score: 2"]}
    judge = Judge("Rate {{answer}}", Number(1, 2), model="judge", max_tokens=32, structured_outputs=choices)
    assert (await judge(address, answer="4")).score in (1, 2)
    verdict = Number(1, 2)
    judge = Judge("Rate {{answer}}", verdict, model="judge", max_tokens=32, expected=True, structured_outputs=choices)
    judgement = await judge(address, answer="4")
    assert 1 <= (judgement.score or 0) <= 2
    assert judgement.score == expected_score(verdict, judgement.reply.text, judgement.reply)
    judge = Judge("Rate {{answer}}", Json(Grade, enforce=True), model="judge", max_tokens=64)
    judgement = await judge(address, answer="4")
    # A random model may spend all its tokens on spaces, which JSON lets it.
    assert judgement.score in (0, 1) or judgement.reply.cut_off


async def test_errors_of_vllm_and_of_the_router(models: RewardModelManager, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        await client.chat.completions.create(
            model="judge", messages=[{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}], max_tokens=8
        )
    assert isinstance(long.value.body, dict)
    assert long.value.body["type"] == "BadRequestError"
    with pytest.raises(openai.NotFoundError, match="available models: judge, scorer"):
        await client.chat.completions.create(model="nonesuch", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="needs a generative server") as wrong_kind:
        await client.chat.completions.create(model="scorer", messages=HELLO)
    assert isinstance(wrong_kind.value.body, dict)
    assert wrong_kind.value.body["type"] == "RouterError"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="judge", messages=HELLO, temperature=-1)
    status, body = await post(_url(models), "/v1/chat/completions", b'{"model": ', **JSON)
    assert (status, "not JSON" in json.loads(body)["error"]["message"]) == (400, True)
    status, body = await _classify(models, input="x" * 2 * MAX_MODEL_LEN)
    assert (status, body["error"]["code"]) == (400, 400)


async def test_a_killed_engine_core_is_replaced_and_costs_the_other_model_nothing(
    models: RewardModelManager, client: Any
) -> None:
    before = models.pids()
    children = below(before["server 2"])
    cores = [process.pid for process in children if "EngineCor" in process.name() or "EngineCor" in _title(process)]
    assert cores
    watched = Watched([process.pid for process in children])
    os.kill(cores[0], signal.SIGKILL)
    async with asyncio.timeout(600):
        while (await _classify(models, input="a"))[0] != 200:
            # The engine's own 500, while it has not noticed yet.
            answer = await client.chat.completions.create(model="judge", messages=HELLO, max_tokens=2)
            assert answer.choices
        while models.pids().get("server 2") in (None, before["server 2"]):
            await _classify(models, input="a")
    after = models.pids()
    assert after["server 1"] == before["server 1"]
    assert watched.left_after() == 0
    watched.close()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
