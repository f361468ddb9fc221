from __future__ import annotations

import pytest

from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig
from reward_loop.router.messages import Refusal
from reward_loop.router.pool import BackendPool, route

JUDGE = BackendConfig(url="http://a:1", models=("judge",), kind="generative")
SCORER = BackendConfig(url="http://b:1", models=("scorer",), kind="discriminative")
CHAT, CLASSIFY = "/v1/chat/completions", "/classify"


async def well(backend: Backend) -> None:
    pass


async def refusal(pool: BackendPool, path: str, body: bytes) -> tuple[int, str]:
    with pytest.raises(Refusal) as refused:
        route(pool, path, body)
    return refused.value.status, refused.value.message


async def test_with_one_model_bodies_are_not_looked_at() -> None:
    async with BackendPool([JUDGE, JUDGE.model_copy(update={"url": "http://c:1"})], well) as pool:
        assert route(pool, CHAT, b"not JSON") == (None, "generative")
        assert route(pool, "/version", b"") == (None, None)
        assert route(pool, "/v1/rerank", b"{}") == (None, None)  # of generative SGLang servers, too


async def test_requests_go_by_the_model_that_they_name() -> None:
    async with BackendPool([JUDGE, SCORER], well) as pool:
        assert route(pool, CHAT, b'{"model": "judge"}') == ("judge", "generative")
        assert route(pool, CLASSIFY, b'{"model": "scorer", "input": "x"}') == ("scorer", "discriminative")
        assert route(pool, "/tokenize", b'{"model": "scorer"}') == ("scorer", None)
        assert route(pool, "/tokenize", b"not JSON") == (None, None)
        status, message = await refusal(pool, CHAT, b'{"model": "x"}')
        assert (status, message) == (404, "the model 'x' does not exist; available models: judge, scorer")
        assert (await refusal(pool, CHAT, b"{}"))[0] == 400
        assert (await refusal(pool, CHAT, b"{"))[0] == 400
        assert (await refusal(pool, CHAT, b"[1]"))[0] == 400


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
async def test_reranking_names_its_model_if_there_are_several(path: str) -> None:
    rerankers = [SCORER, BackendConfig(url="http://c:1", models=("other",), kind="discriminative")]
    async with BackendPool(rerankers, well) as pool:
        status, message = await refusal(pool, path, b'{"query": "q", "documents": ["d"]}')
        assert (status, message) == (400, "the field 'model' is missing; available models: other, scorer")
        assert (await refusal(pool, path, b"{"))[0] == 400
        assert route(pool, path, b'{"model": "scorer"}') == ("scorer", None)


async def test_a_server_is_not_asked_for_what_it_cannot_do() -> None:
    async with BackendPool([JUDGE, SCORER], well) as pool:
        status, message = await refusal(pool, CHAT, b'{"model": "scorer"}')
        assert status == 400
        assert "needs a generative server, which 'scorer' is not" in message
    async with BackendPool([SCORER], well) as pool:
        assert await refusal(pool, CHAT, b"") == (
            400,
            "/v1/chat/completions needs a generative server; available: scorer (discriminative)",
        )
    async with BackendPool([], well) as pool:
        assert (await refusal(pool, CHAT, b""))[0] == 503


@pytest.mark.parametrize("body", [b'{"text": ""}', b'{"input": []}', b'{"text": ["x", ""]}', b'{"input_ids": [[]]}'])
async def test_empty_texts_are_kept_from_sglang(body: bytes) -> None:
    sglang = SCORER.model_copy(update={"engine": "sglang"})
    async with BackendPool([sglang], well) as pool:
        assert (await refusal(pool, CLASSIFY, body))[0] == 400
        assert route(pool, CLASSIFY, b'{"text": "x"}') == (None, "discriminative")
    async with BackendPool([SCORER], well) as pool:
        assert route(pool, CLASSIFY, body) == (None, "discriminative")
