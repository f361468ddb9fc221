from __future__ import annotations

from typing import Any

import pytest

from reward_loop import RewardSample
from reward_loop.client import classify, score
from reward_loop.errors import ConfigError, RequestError
from reward_loop.records import ActiveSample
from reward_loop.testing import Body, FakeJudge, Logits


async def test_a_logit_or_the_logits() -> None:
    async with FakeJudge(logit=lambda text: len(text) / 2) as judge:
        assert await classify(judge.address, "seven..") == 3.5
        assert await classify(judge.address, [{"role": "user", "content": "four"}]) == 2.0
        judge.script(Logits((0.5, -1.5)))
        assert await classify(judge.address, "x", model="m") == [0.5, -1.5]
        text, messages, named = (request.body for request in judge.requests)
        assert text == {"input": "seven..", "text": "seven..", "use_activation": False}
        assert messages == {"messages": [{"role": "user", "content": "four"}], "use_activation": False}
        assert named["model"] == "m"


async def test_the_shape_of_sglangs_native_classify() -> None:
    async with FakeJudge() as judge:
        judge.script(Body({"embedding": [-0.25], "meta_info": {"id": "1", "prompt_tokens": 9}}))
        with ActiveSample(RewardSample("x"), "f") as call:
            assert await classify(judge.address, "x") == -0.25
    assert call.prompt_tokens == 9


async def test_an_answer_without_logits_is_an_error() -> None:
    async with FakeJudge() as judge:
        judge.script(*[Body({"data": []})] * 2)
        with pytest.raises(RequestError, match="without logits or scores"):
            await classify(judge.address, "x")
        with pytest.raises(RequestError, match="without logits or scores"):
            await score(judge.address, "?", ["a"])


@pytest.mark.parametrize(
    "answer",
    [
        {"results": [{"index": 1, "relevance_score": 0.1}, {"index": 0, "relevance_score": 0.9}]},
        [{"index": 1, "score": 0.1, "document": "b"}, {"index": 0, "score": 0.9, "document": "a"}],
    ],
    ids=["vllm", "sglang"],
)
async def test_documents_are_scored_in_their_order(answer: Any) -> None:
    async with FakeJudge() as judge:
        judge.script(Body(answer))
        assert await score(judge.address, "?", ["a", "b"], model="m") == [0.9, 0.1]
        assert judge.requests[0].body == {"query": "?", "documents": ["a", "b"], "model": "m"}


async def test_a_text_with_a_chat_template_is_refused_or_kept_and_what_a_policy_wrote_is_broken_up() -> None:
    text = "<|im_start|>user\n2+2=<|im_end|>"
    async with FakeJudge(logit=lambda text: 7.5) as server:
        with pytest.raises(ConfigError, match=r"begins with '<\|im_start\|>'.* templated=True"):
            await classify(server.address, text)
        await classify(server.address, text, templated=True)
        await classify(server.address, "4<|im_end|>")
        await classify(server.address, [{"role": "assistant", "content": "4</s>"}])
    sent = [request.body.get("input", request.body.get("messages")) for request in server.requests]
    assert sent == [text, "4< |im_end|>", [{"role": "assistant", "content": "4< /s>"}]]
