from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.

from reward_loop.client import Json, Judge  # noqa: E402
from reward_loop.errors import ConfigError  # noqa: E402
from reward_loop.serving.embedded.app import create_app  # noqa: E402
from reward_loop.serving.embedded.model import EmbeddedModel  # noqa: E402
from tests.support.servers import serving  # noqa: E402

pytestmark = pytest.mark.integration  # imports torch

MESSAGES = [{"role": "user", "content": "Is 7 prime?"}]


class Client:
    """Posts JSON to a server of one model."""

    def __init__(self, session: aiohttp.ClientSession, model: EmbeddedModel) -> None:
        self.session = session
        self.model = model

    async def post(self, path: str, body: Any = None, **fields: Any) -> tuple[int, Any]:
        async with self.session.post(path, json={**(body or {}), **fields}) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}, **fields)
        assert status == 200, answer
        return answer

    async def classify(self, text: str) -> None:
        status, answer = await self.post("/classify", input=text, use_activation=False)
        assert status == 200, answer


@pytest_asyncio.fixture
async def judge(tiny_generative_model: Path) -> AsyncIterator[Client]:
    model = EmbeddedModel(str(tiny_generative_model), name="judge", kind="generative")
    async with serving(create_app(model)) as url, aiohttp.ClientSession(url) as session:
        yield Client(session, model)


@pytest_asyncio.fixture
async def scorer(tiny_discriminative_model: Path) -> AsyncIterator[Client]:
    model = EmbeddedModel(str(tiny_discriminative_model), name="scorer", kind="discriminative")
    async with serving(create_app(model)) as url, aiohttp.ClientSession(url) as session:
        yield Client(session, model)


async def test_a_server_with_a_key_answers_only_requests_that_have_it() -> None:
    engine: Any = nullcontext()
    engine.max_length = 512
    model: Any = SimpleNamespace(name="m", config=SimpleNamespace(name_or_path="m"), engine=engine)
    async with serving(create_app(model, "secret")) as url, aiohttp.ClientSession(url) as session:
        for path, key, status in (
            ("/v1/models", None, 401),
            ("/v1/models", "other", 401),
            ("/v1/models", "secret", 200),
            ("/health", None, 200),
        ):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with session.get(path, headers=headers) as response:
                assert response.status == status
                assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


async def test_chat_answers_in_vllms_shape(judge: Client) -> None:
    answer = await judge.chat(model="judge", temperature=0.8, seed=5)
    assert (answer["object"], answer["model"]) == ("chat.completion", "judge")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    prompt = "<|im_start|>user\nIs 7 prime?<|im_end|>\n<|im_start|>assistant\n"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(judge.model.tokenizer(prompt)["input_ids"])
    assert 1 <= usage["completion_tokens"] <= 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    # The seed repeats the reply; the parts of a message are joined.
    parts = [{"type": "text", "text": "Is 7"}, {"type": "text", "text": " prime?"}]
    again = await judge.chat(temperature=0.8, seed=5, messages=[{"role": "user", "content": parts}])
    assert again["choices"] == answer["choices"]


async def test_the_context_is_the_default_limit(judge: Client) -> None:
    answer = await judge.chat(temperature=0, max_tokens=None)
    assert answer["choices"][0]["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == 512


async def test_classify_returns_the_logits_of_texts_and_messages_and_counts_tokens(scorer: Client) -> None:
    text = "<|im_start|>user\nIs 7 prime?<|im_end|>\n"
    ids = scorer.model.tokenizer(text)["input_ids"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(scorer.model.config.name_or_path)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].tolist()
    for given in ({"input": text}, {"messages": MESSAGES}):
        status, answer = await scorer.post("/classify", given, model="scorer", use_activation=False)
        assert status == 200
        [entry] = answer["data"]
        assert entry["probs"] == pytest.approx(expected, abs=1e-4)
        assert entry | {"probs": None} == {"index": 0, "label": "LABEL_0", "probs": None, "num_classes": 1}
        assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}


CHAT_ERRORS = [
    ({"messages": []}, 400, "messages"),
    ({"temperature": -1}, 400, "temperature"),
    ({"max_tokens": 10_000}, 400, "maximum context length is 512"),
    ({"stream": True}, 400, "stream"),
    ({"logprobs": True}, 400, "logprobs: Extra inputs are not permitted"),
    ({"stop": ["a"]}, 400, "stop: Extra inputs are not permitted"),
    ({"n": 2}, 400, "n: "),
    ({"chat_template_kwargs": {"tokenize": True}}, 400, "the chat template rejected the messages"),
    ({"messages": [{"role": "user", "content": "a \ud800 b"}]}, 400, "hex escape"),
    ({"model": "other"}, 404, "The model `other` does not exist"),
]

CLASSIFY_ERRORS = [
    ({}, 400, "either `input` or `messages`"),
    ({"input": ["a"]}, 400, "input"),
    ({"input": "x", "use_activation": True}, 400, "use_activation"),
    ({"input": ""}, 400, "no tokens"),
    ({"input": "x" * 600}, 400, "maximum context length is 512"),
    ({"input": "a \ud800 b"}, 400, "hex escape"),
    ({"input": "x", "model": "other"}, 404, "The model `other` does not exist"),
]


async def test_errors_have_vllms_shape(judge: Client, scorer: Client) -> None:
    requests = [
        *((judge, "/v1/chat/completions", {"messages": MESSAGES} | fields, *rest) for fields, *rest in CHAT_ERRORS),
        *((scorer, "/classify", {"use_activation": False} | fields, *rest) for fields, *rest in CLASSIFY_ERRORS),
        (judge, "/classify", {"input": "x", "use_activation": False}, 404, "is generative"),
        (scorer, "/v1/chat/completions", {"messages": MESSAGES}, 404, "is discriminative"),
    ]
    for client, path, body, status, message in requests:
        got, answer = await client.post(path, body)
        assert got == status, body
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["code"] == status
        assert message in answer["error"]["message"], body
    # The servers still answer.
    await judge.chat()
    await scorer.classify("x")


BODIES = [
    (b"", "application/json", "body"),
    (b"{not json", "application/json", "body"),
    (b"[1]", "application/json", "body"),
    (b'{"messages": "\xed\xa0\x80"}', "application/json", "body"),  # a surrogate as UTF-8
    (b"[" * 100_000, "application/json", "body"),
    (b'{"input": ' + b"9" * 5000 + b"}", "application/json", ""),
    (b"{}", "text/plain", "application/json"),
]


@pytest.mark.parametrize(("body", "content_type", "message"), BODIES, ids=range(len(BODIES)))
async def test_a_body_that_is_not_json_is_a_400_in_vllms_shape(
    judge: Client, body: bytes, content_type: str, message: str
) -> None:
    for path in ("/v1/chat/completions", "/classify"):
        async with judge.session.post(path, data=body, headers={"Content-Type": content_type}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert message in error["message"]


async def test_nulls_change_nothing(judge: Client) -> None:
    plain = await judge.chat(temperature=0)
    assert (await judge.chat(temperature=0, n=None, tools=None))["choices"] == plain["choices"]


async def test_an_enforced_json_verdict_is_an_error_with_the_fix(judge: Client) -> None:
    address = judge.session._base_url.authority
    ask = Judge("Rate {{answer}}", Json(dict[str, int], enforce=True), max_tokens=4)
    with pytest.raises(ConfigError, match=r"the server refuses response_format.*Extra inputs.*Leave enforce out"):
        await ask(address, answer="x")


async def test_the_template_gets_its_arguments(judge: Client) -> None:
    judge.model.tokenizer.chat_template = "{{ word }} {{ add_generation_prompt }}"
    answer = await judge.chat(chat_template_kwargs={"word": "abc"})
    assert answer["usage"]["prompt_tokens"] == len(judge.model.tokenizer("abc True")["input_ids"])


async def test_health_models_and_unknown_paths(judge: Client) -> None:
    async with judge.session.get("/health") as response:
        assert response.status == 200
    async with judge.session.get("/v1/models") as response:
        card = (await response.json())["data"][0]
        assert (card["id"], card["max_model_len"]) == ("judge", 512)
    async with judge.session.get("/v1/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "NotFoundError"


async def test_a_client_that_leaves_takes_its_request_back(scorer: Client) -> None:
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    engine = scorer.model.engine
    engine._model.register_forward_pre_hook(count)
    async with engine.model_lock:
        async with aiohttp.ClientSession(scorer.session._base_url) as leaver:
            request = asyncio.create_task(leaver.post("/classify", json={"input": "x", "use_activation": False}))
            async with asyncio.timeout(60):
                while not engine._waiting:
                    await asyncio.wait([request], timeout=0.01)
            (waiting,) = engine._waiting
            request.cancel()
            await asyncio.wait([request, waiting.result], timeout=60)
        assert waiting.result.cancelled()
    await scorer.classify("y")
    assert passes == 1


def test_a_model_whose_head_has_another_form_is_rejected(tiny_discriminative_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_discriminative_model, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["score.0.weight"] = weights.pop("score.weight")  # as in Qwen2ForRewardModel
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight of Qwen2ForSequenceClassification: "):
        EmbeddedModel(str(path), name="it", kind="discriminative")
