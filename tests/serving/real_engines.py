"""Tests of each real engine, with a generative model ``judge`` and a discriminative ``scorer`` behind one router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import aiohttp
import psutil
import pytest
from pydantic import BaseModel

from reward_loop.client import Json, Judge, chat_complete, classify, score
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import RequestError
from reward_loop.serving import RewardModelManager
from tests.support.servers import CHAT, Watched, post

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXTS = ["a", "an answer", "twelve plus thirty is forty-two", "12+30=42", "\n"]
TOO_LONG = "x" * 1024
IN_THE_ENGINE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The environment of a vLLM whose model runs in the process of the engine, as on one GPU.

By default, on a CPU, it has a process of its own, whose imports take 9 s of CPU time."""


FORKING = {"PYTHONPATH": str(Path(__file__).with_name("forking"))}
"""The environment of servers that fork their processes: see its ``sitecustomize.py``."""


def config_of(judge: Path, scorer: Path, log_dir: Path, judge_args: dict[str, Any], **options: Any) -> Any:
    """Return the configuration of the two models; `judge_args` are engine arguments of the judge only."""
    options = {"dtype": "float32", "start_timeout_s": 600, **options}
    judges = options | {"engine_args": options["engine_args"] | judge_args}
    models = {
        "judge": ServedModelConfig(model_path=str(judge), **judges),
        "scorer": ServedModelConfig(model_path=str(scorer), **options),
    }
    return RewardModelConfig(models=models, log_dir=str(log_dir))


def url_of(models: RewardModelManager) -> str:
    return f"http://{models.reward_router_address}"


async def judge_url(models: RewardModelManager) -> str:
    """Return the URL of the judge's server itself."""
    async with aiohttp.ClientSession(url_of(models)) as session, session.get("/workers") as response:
        (url,) = [worker["url"] for worker in await response.json() if "judge" in worker["models"]]
        return url


async def ask(url: str, path: str, body: Any) -> tuple[int, Any]:
    """Send a request, whose body may be no JSON; return status and JSON of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = await post(url, path, data, headers={"content-type": "application/json"})
    return status, json.loads(answer or "null")


class RealEngine:
    """The tests of each engine."""

    streamed: ClassVar[dict[str, Any]] = {}
    """Fields of a request whose stream has the same text as its reply."""
    rejected: ClassVar[list[tuple[str, Any, int]]] = []
    """Further requests that the router rejects: path, body and status."""
    child: str
    """Part of the name of a process of the server without which it cannot answer."""

    async def test_the_openai_client_chats(self, client: Any) -> None:
        answer = await client.chat.completions.create(model="judge", messages=HELLO, max_tokens=8, temperature=0)
        assert answer.choices[0].message.role == "assistant"
        assert 1 <= answer.usage.completion_tokens <= 8
        assert {model.id async for model in client.models.list()} == {"judge", "scorer"}

    async def test_a_stream_arrives_in_parts_with_the_same_text_and_the_usage(self, client: Any) -> None:
        request: dict[str, Any] = {"model": "judge", "messages": HELLO, "temperature": 0, **self.streamed}
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert len(parts) > 2
        assert "".join(parts) == whole.choices[0].message.content
        assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)

    async def test_a_judge_with_a_json_schema_and_log_probabilities(self, models: RewardModelManager) -> None:
        class Grade(BaseModel):
            score: Literal[0, 1]

        judge = Judge("Rate {{answer}}", Json(Grade, enforce=True), model="judge", max_tokens=64)
        judgement = await judge(models.reward_router_address, answer="4")
        # A random model may spend all its tokens on spaces, which JSON lets it.
        assert judgement.score in (0, 1) or judgement.reply.cut_off
        options: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": True}
        reply = await chat_complete(models.reward_router_address, HELLO, model="judge", **options)
        assert reply.logprobs is not None
        assert len(reply.logprobs) == reply.usage.completion_tokens
        assert reply.cut_off == (reply.usage.completion_tokens == 4)

    async def test_the_logits_are_those_of_transformers(
        self, models: RewardModelManager, tiny_discriminative_model: Path
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path, address = tiny_discriminative_model, models.reward_router_address
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in TEXTS]
        assert [await classify(address, text, model="scorer") for text in TEXTS] == pytest.approx(expected, abs=1e-4)
        assert max(expected) - min(expected) > 0.01
        assert len(await score(address, "12+30=", ["42", "a"], model="scorer")) == 2

    async def test_errors_of_the_engine_are_passed_on_and_the_router_rejects_other_requests(
        self, models: RewardModelManager
    ) -> None:
        before, url = models.pids(), url_of(models)
        with pytest.raises(RequestError, match="context length") as long:
            await chat_complete(models.reward_router_address, TOO_LONG, model="judge")
        assert (long.value.status, long.value.transient) == (400, False)
        status, answer = await ask(url, CHAT, {"model": "judge", "messages": HELLO, "temperature": -1})
        assert (status, "temperature" in json.dumps(answer)) == (400, True)
        for path, body, status in (
            (CHAT, b'{"model": ', 400),
            (CHAT, {"model": "nonesuch", "messages": HELLO}, 404),
            (CHAT, {"model": "scorer", "messages": HELLO}, 400),
            *self.rejected,
        ):
            got, answer = await ask(url, path, body)
            assert (got, answer["error"]["type"]) == (status, "RouterError"), (path, body)
        assert models.pids() == before

    async def test_a_server_without_its_engine_process_is_replaced_and_requests_survive(
        self, models: RewardModelManager
    ) -> None:
        address, before = models.reward_router_address, models.pids()
        children = psutil.Process(before["server 2"]).children(recursive=True)
        watched = Watched([child.pid for child in children])
        engine = next(child for child in children if self.child in f"{child.name()} {' '.join(child.cmdline())}")

        async def answered(text: str) -> Any:
            while True:
                try:
                    return await classify(address, text, model="scorer")
                except RequestError as error:
                    if not error.transient:  # the server's own error 500, while it has not noticed, is transient
                        raise

        requests = [asyncio.create_task(answered(text)) for text in TEXTS]
        engine.kill()
        requests += [asyncio.create_task(answered(text)) for text in TEXTS]
        async with asyncio.timeout(600):
            logits = await asyncio.gather(*requests)
        assert logits[5:] == pytest.approx(logits[:5], abs=1e-4)
        assert watched.left_after() == 0
        watched.close()
        after = models.pids()
        assert after["server 1"] == before["server 1"]
        assert after["server 2"] != before["server 2"]
        assert (await chat_complete(address, HELLO, model="judge", max_tokens=2)).usage is not None
