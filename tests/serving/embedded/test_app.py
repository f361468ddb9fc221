from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.

from reward_loop.client import Json, Judge  # noqa: E402
from reward_loop.errors import ConfigError, RequestError  # noqa: E402
from reward_loop.router.app import Router  # noqa: E402
from reward_loop.serving.embedded.app import create_app  # noqa: E402
from reward_loop.serving.embedded.model import EmbeddedModel  # noqa: E402
from tests.servers import served_by_router, serving  # noqa: E402

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

    async def probs(self, **fields: Any) -> list[list[float]]:
        status, answer = await self.post("/classify", **fields)
        assert status == 200, answer
        return [entry["probs"] for entry in answer["data"]]


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
        ({"stream": True}, 400, "does not support streaming"),
        ({"top_logprobs": 3}, 400, "chosen tokens"),
        ({"seed": 2**63}, 400, "seed"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"frequency_penalty": -3}, 400, "frequency_penalty"),
        ({"min_p": 2}, 400, "min_p"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, 400, "logit_bias: token ids must be"),
        ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, 400, "no tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs cannot set tokenize"),
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


BODIES = [
    b"",
    b"{not json",
    b"[1]",
    b"\xff",
    b'{"messages": "\xed\xa0\x80"}',  # a surrogate as UTF-8
    b"[" * 100_000,
    b'{"input": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/classify"])
async def test_a_body_that_cannot_be_parsed_is_a_400_in_vllms_shape(judge: Client, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with judge.session.post(path, data=body, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


async def test_a_body_of_another_content_type_is_refused(judge: Client) -> None:
    async with judge.session.post("/v1/chat/completions", data=b"{}") as response:
        assert response.status == 400
        assert "application/json" in (await response.json())["error"]["message"]


LONE = "a \ud800 b"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONE}]},
        {"messages": [{"role": LONE, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
        {"model": LONE},
        {"stop": [LONE]},
        {"some_unknown_field": {LONE: 1}},
        {"chat_template_kwargs": {"x": LONE}},
    ],
)
async def test_a_lone_surrogate_in_a_chat_request_is_a_400_with_the_fix(judge: Client, fields: Any) -> None:
    status, answer = await judge.post("/v1/chat/completions", {"messages": MESSAGES}, **fields)
    assert status == 400, answer
    assert "lone" in answer["error"]["message"]
    assert "text.encode('utf-8', 'replace')" in answer["error"]["message"]
    await judge.chat()


@pytest.mark.parametrize("fields", [{"input": LONE}, {"input": ["x", LONE]}, {"input": "x", "model": LONE}])
async def test_a_lone_surrogate_in_a_classification_is_a_400(scorer: Client, fields: Any) -> None:
    status, answer = await scorer.post("/classify", **fields)
    assert status == 400, answer
    await scorer.probs(input="x")


async def test_samples_with_lone_surrogates_do_not_make_the_router_mark_the_server_unhealthy(scorer: Client) -> None:
    url = str(scorer.session._base_url).rstrip("/")
    async with served_by_router(Router([url])) as router, aiohttp.ClientSession(router) as session:
        asked = Client(session, scorer.model)
        await asyncio.wait_for(_until_usable(session), 60)
        for _ in range(16):
            assert (await asked.post("/classify", input=LONE))[0] == 400
            await asked.probs(input="x")


async def _until_usable(session: aiohttp.ClientSession) -> None:
    while True:
        async with session.get("/ready") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.01)


async def test_an_internal_error_announces_that_the_connection_closes(
    judge: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of the server")

    monkeypatch.setattr(judge.model.engine, "generate", broken)
    async with judge.session.post("/v1/chat/completions", json={"messages": MESSAGES}) as response:
        assert response.status == 500
        assert response.headers["Connection"] == "close"
        assert "a fault of the server" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("structured_outputs", {"choice": ["a"]}),
        ("guided_regex", "a+"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("ignore_eos", True),
        ("min_tokens", 4),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("chat_template", "x"),
    ],
)
async def test_an_unsupported_option_of_a_chat_is_refused_by_name(judge: Client, name: str, value: Any) -> None:
    status, answer = await judge.post("/v1/chat/completions", {"messages": MESSAGES}, **{name: value})
    assert status == 400
    assert f"`{name}`" in answer["error"]["message"]
    assert answer["error"]["param"] == name


async def test_values_that_change_nothing_are_accepted(judge: Client) -> None:
    plain = await judge.chat(temperature=0)
    harmless = await judge.chat(
        temperature=0,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        presence_penalty=None,
        frequency_penalty=0.0,
        n=None,
        stop=None,
        truncate_prompt_tokens=None,
        ignore_eos=False,
        min_tokens=0,
        user="someone",
    )
    assert harmless["choices"] == plain["choices"]


async def test_an_enforced_json_verdict_is_an_error_with_the_fix(judge: Client) -> None:
    address = judge.session._base_url.authority
    ask = Judge("Rate {{answer}}", Json(dict[str, int], enforce=True), max_tokens=4)
    with pytest.raises(RequestError, match=r"enforce=False.*vllm") as raised:
        await ask(address, answer="x")
    assert (raised.value.status, raised.value.transient) == (400, False)


async def test_a_bias_forces_a_token(judge: Client) -> None:
    first = (await judge.chat(temperature=0, max_tokens=1, logprobs=True))["choices"][0]
    token = judge.model.tokenizer.convert_tokens_to_ids("z")
    forced = await judge.chat(temperature=0, max_tokens=3, logit_bias={str(token): 1000})
    assert forced["choices"][0]["message"]["content"] == "zzz"
    assert first["message"]["content"] != "z"


async def test_presence_and_frequency_penalties_count_the_tokens_of_the_response_alone(judge: Client) -> None:
    token = judge.model.tokenizer.convert_tokens_to_ids("z")
    bias = {str(token): 100.0}

    async def logprobs(**fields: Any) -> list[float]:
        fields = {"temperature": 0, "max_tokens": 3, "logprobs": True, "logit_bias": bias, **fields}
        entries = (await judge.chat(messages=[{"role": "user", "content": "zzz"}], **fields))["choices"][0]
        return [entry["logprob"] for entry in entries["logprobs"]["content"]]

    # With a bias of 100, the forced token has all of the probability; the penalties leave it that.
    assert await logprobs() == pytest.approx([0, 0, 0], abs=1e-4)
    weak = {str(token): 12.0}
    plain, frequency, presence = [
        await logprobs(logit_bias=weak, **penalty)
        for penalty in ({}, {"frequency_penalty": 2}, {"presence_penalty": 2})
    ]
    assert plain[0] == pytest.approx(frequency[0]) == pytest.approx(presence[0])  # the prompt does not count
    assert plain[1] > frequency[1]
    assert frequency[1] == pytest.approx(presence[1], abs=1e-4)  # after one token they are equal
    assert frequency[2] < presence[2] < plain[2]


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-6, None)), ("right", slice(0, 6)), (None, slice(0, 6))])
async def test_a_prompt_is_truncated_on_the_side_asked_for(scorer: Client, side: str | None, kept: slice) -> None:
    text = "one two three four five"
    ids = scorer.model.tokenizer(text)["input_ids"]
    assert scorer.model.tokenizer.truncation_side == "right"
    options = {"truncate_prompt_tokens": 6, "truncation_side": side}
    expected = await scorer.probs(input=ids[kept])
    assert await scorer.probs(input=text, **options) == expected
    assert await scorer.probs(input=ids, **options) == expected


async def test_minus_one_truncates_a_prompt_to_the_room_that_the_model_has(judge: Client, scorer: Client) -> None:
    await scorer.probs(input="x" * 600, truncate_prompt_tokens=-1)
    long = [{"role": "user", "content": "x" * 600}]
    answer = await judge.chat(messages=long, truncate_prompt_tokens=-1, truncation_side="left", max_tokens=8)
    assert answer["usage"]["prompt_tokens"] == 504


async def test_the_template_gets_its_arguments(judge: Client) -> None:
    usual = await judge.chat()
    shorter = await judge.chat(add_generation_prompt=False)
    assert shorter["usage"]["prompt_tokens"] < usual["usage"]["prompt_tokens"]
    judge.model.tokenizer.chat_template = "{{ word }} {{ reasoning_effort }}"
    answer = await judge.chat(chat_template_kwargs={"word": "abc"}, reasoning_effort="low")
    assert answer["usage"]["prompt_tokens"] == len(judge.model.tokenizer("abc low")["input_ids"])


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


def test_a_model_whose_head_has_another_form_is_rejected(tiny_discriminative_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_discriminative_model, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["score.0.weight"] = weights.pop("score.weight")  # as in Qwen2ForRewardModel
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight of Qwen2ForSequenceClassification: "):
        EmbeddedModel(str(path), name="it", kind="discriminative")
