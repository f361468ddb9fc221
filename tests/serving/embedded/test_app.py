from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.

from reward_loop.serving.embedded.app import EmbeddedModel, create_app, load_model  # noqa: E402
from tests.servers import serving  # noqa: E402

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

    async def probs(self, **fields: Any) -> list[list[float]]:
        status, answer = await self.post("/classify", **fields)
        assert status == 200, answer
        return [entry["probs"] for entry in answer["data"]]


@pytest_asyncio.fixture
async def judge(tiny_generative_model: Path) -> AsyncIterator[Client]:
    model = load_model(str(tiny_generative_model), name="judge", kind="generative")
    async with serving(create_app(model)) as url, aiohttp.ClientSession(url) as session:
        yield Client(session, model)


@pytest_asyncio.fixture
async def scorer(tiny_discriminative_model: Path) -> AsyncIterator[Client]:
    model = load_model(str(tiny_discriminative_model), name="scorer", kind="discriminative")
    async with serving(create_app(model)) as url, aiohttp.ClientSession(url) as session:
        yield Client(session, model)


async def test_chat_answers_in_vllms_shape(judge: Client) -> None:
    answer = await judge.chat(model="judge", n=3, temperature=0.8)
    assert (answer["object"], answer["model"]) == ("chat.completion", "judge")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "length")
        assert choice["logprobs"] is None
    prompt = "<|im_start|>user\nIs 7 prime?<|im_end|>\n<|im_start|>assistant\n"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(judge.model.tokenizer(prompt)["input_ids"])
    assert 3 <= usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_content_parts_are_joined(judge: Client) -> None:
    parts = [{"type": "text", "text": "Is 7"}, {"type": "text", "text": " prime?"}]
    whole = await judge.chat(temperature=0)
    split = await judge.chat(temperature=0, messages=[{"role": "user", "content": parts}])
    assert split["choices"] == whole["choices"]
    assert split["usage"] == whole["usage"]


async def test_a_seed_repeats_its_choices_and_n_of_them_differ(judge: Client) -> None:
    first, second = [await judge.chat(seed=5, n=2, max_tokens=20) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["message"] != first["choices"][1]["message"]


async def test_a_stop_string_ends_the_text(judge: Client) -> None:
    text = (await judge.chat(temperature=0, max_tokens=20))["choices"][0]["message"]["content"]
    stop = text[5:7]
    choice = (await judge.chat(temperature=0, max_tokens=20, stop=[stop, "never this"]))["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_logprobs_are_of_the_chosen_tokens(judge: Client) -> None:
    answer = await judge.chat(logprobs=True, temperature=0)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(entry["logprob"] <= 0 for entry in content)


async def test_without_max_tokens_the_context_is_the_limit(judge: Client) -> None:
    answer = await judge.chat(max_tokens=None, temperature=0)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: {"input": "good answer"},
        lambda ids: {"input": ["good answer", "good answer"]},
        lambda ids: {"input": ids},
        lambda ids: {"input": [ids, ids]},
    ],
)
async def test_classify_takes_every_form_of_input(scorer: Client, form: Any) -> None:
    ids = scorer.model.tokenizer("good answer")["input_ids"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(scorer.model.config.name_or_path)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].tolist()
    body = form(ids)
    count = 1 if body["input"] in ("good answer", ids) else 2
    raw = await scorer.probs(use_activation=False, **body)
    assert raw == [pytest.approx(expected, abs=1e-4)] * count
    activated = await scorer.probs(**body)
    assert activated == [pytest.approx([torch.tensor(expected).sigmoid().item()], abs=1e-4)] * count


async def test_classify_takes_messages_and_counts_tokens(scorer: Client) -> None:
    status, answer = await scorer.post("/classify", messages=MESSAGES, model="scorer")
    assert status == 200
    text = "<|im_start|>user\nIs 7 prime?<|im_end|>\n"
    assert [entry["probs"] for entry in answer["data"]] == await scorer.probs(input=text)
    assert answer["data"][0] | {"probs": None} == {"index": 0, "label": "LABEL_0", "probs": None, "num_classes": 1}
    tokens = len(scorer.model.tokenizer(text)["input_ids"])
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": 10_000}, 400, "maximum context length is 512"),
        ({"stream": True}, 400, "does not stream"),
        ({"top_logprobs": 3}, 400, "chosen tokens"),
        ({"seed": 2**63}, 400, "seed"),
        ({"model": "other"}, 404, "The model `other` does not exist"),
    ],
)
async def test_chat_errors_have_vllms_shape(judge: Client, fields: Any, status: int, message: str) -> None:
    got, answer = await judge.post("/v1/chat/completions", {"messages": MESSAGES}, **fields)
    assert got == status
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({}, 400, "either `input` or `messages`"),
        ({"input": 5}, 400, "input"),
        ({"input": []}, 400, "must not be empty"),
        ({"input": ["a", []]}, 400, "input"),
        ({"input": ""}, 400, "no tokens"),
        ({"input": [10**6]}, 400, "token ids must be"),
        ({"input": "x" * 600}, 400, "maximum context length is 512"),
        ({"input": "x", "model": "other"}, 404, "The model `other` does not exist"),
    ],
)
async def test_classify_errors_have_vllms_shape(scorer: Client, fields: Any, status: int, message: str) -> None:
    got, answer = await scorer.post("/classify", **fields)
    assert got == status
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == status


async def test_each_kind_refuses_the_others_requests(judge: Client, scorer: Client) -> None:
    assert (await judge.post("/classify", input="x"))[0] == 404
    assert (await scorer.post("/v1/chat/completions", messages=MESSAGES))[0] == 404


async def test_bad_json_health_models_and_unknown_paths(judge: Client) -> None:
    headers = {"Content-Type": "application/json"}
    async with judge.session.post("/v1/chat/completions", data=b"{not json", headers=headers) as response:
        assert response.status == 400
        assert "error" in await response.json()
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
    async with engine.exclusive():
        async with aiohttp.ClientSession(scorer.session._base_url) as leaver:
            request = asyncio.create_task(leaver.post("/classify", json={"input": "x"}))
            async with asyncio.timeout(60):
                while not engine._groups:
                    await asyncio.wait([request], timeout=0.01)
            (waiting,) = next(iter(engine._groups.values()))
            request.cancel()
            await asyncio.wait([request, waiting.result], timeout=60)
        assert waiting.result.cancelled()
    await scorer.probs(input="y")
    assert passes == 1


@pytest.mark.parametrize("kind", ["generative", "discriminative"])
async def test_asleep_it_holds_no_weights_and_awake_it_answers_as_before(
    kind: Any, tiny_generative_model: Path, tiny_discriminative_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_generative_model if kind == "generative" else tiny_discriminative_model
    model = load_model(str(path), name="it", kind=kind)
    held = model._model.state_dict()
    async with (
        serving(create_app(model, can_sleep=True)) as url,
        aiohttp.ClientSession(url) as session,
        asyncio.timeout(120),
    ):
        client = Client(session, model)

        async def ask() -> Any:
            if kind == "generative":
                return (await client.chat(temperature=0, logprobs=True))["choices"]
            return await client.probs(input="Is 7 prime?", use_activation=False)

        before = await ask()
        for _ in range(2):  # twice is once
            assert (await client.post("/sleep?level=1"))[0] == 200
        assert sum(tensor.numel() for tensor in model._model.state_dict().values()) == 0
        waiting = asyncio.create_task(ask())
        async with session.get("/is_sleeping") as response:
            assert await response.json() == {"is_sleeping": True}
        assert not waiting.done()
        for _ in range(2):
            assert (await client.post("/wake_up"))[0] == 200
        assert await waiting == before == await ask()
        async with session.get("/is_sleeping") as response:
            assert await response.json() == {"is_sleeping": False}
    assert {name: tuple(tensor.shape) for name, tensor in model._model.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in held.items()
    }
    log = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in log] == ["asleep; answers so far: 1", "awake; answers so far: 1"]


async def test_who_does_not_say_so_cannot_put_it_to_sleep(scorer: Client) -> None:
    assert (await scorer.post("/sleep"))[0] == 404
