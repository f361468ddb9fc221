"""The fake judge server that users test with."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from typing import Any

import aiohttp
import pytest

from reward_loop.testing import Answer, BadJson, Drop, FakeJudge, Logits, Stall, Status


def chat(server: FakeJudge, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, bytes, dict[str, str]]:
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("POST", path, json.dumps({"messages": [{"role": "user", "content": "2+2?"}], **body}))
        response = connection.getresponse()
        return response.status, response.read(), dict(response.headers)
    finally:
        connection.close()


def test_the_script_comes_first_then_the_normal_reply() -> None:
    with FakeJudge(lambda body: f"Score: {len(body['messages'])}") as judge:
        judge.script(Status(429, retry_after=2), Answer("cut", "length"), "third", BadJson(), Drop())
        status, _, headers = chat(judge)
        assert (status, headers["Retry-After"]) == (429, "2")
        assert json.loads(chat(judge)[1])["choices"][0]["finish_reason"] == "length"
        assert json.loads(chat(judge)[1])["choices"][0]["message"]["content"] == "third"
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            json.loads(chat(judge)[1])
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            chat(judge)
        answer = json.loads(chat(judge, temperature=0)[1])
        assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("Score: 1", 2)
        dropped, last = judge.requests[-2:]
        assert isinstance(dropped.behaviour, Drop)
        assert (last.path, last.body["temperature"], last.abandoned) == ("/v1/chat/completions", 0, False)
        assert last.ended.wait(30)


def test_random_faults_are_those_of_the_seed() -> None:
    def run() -> list[str]:
        with FakeJudge(faults={Status(503): 0.3, BadJson(): 0.3}, seed=5) as judge:
            for _ in range(30):
                chat(judge)
            return [type(request.behaviour).__name__ for request in judge.requests]

    first = run()
    assert set(Counter(first)) == {"Status", "BadJson", "Answer"}
    assert run() == first


def test_classification_and_reranking() -> None:
    with FakeJudge(logit=len) as judge:
        _, data, _ = chat(judge, "/classify", input="four")
        assert json.loads(data)["data"][0]["probs"] == [4]
        _, data, _ = chat(judge, "/v1/rerank", query="?", documents=["a", "bb"])
        assert [result["relevance_score"] for result in json.loads(data)["results"]] == [1, 2]
        judge.script(Logits((0.25, 0.75)))
        assert json.loads(chat(judge, "/classify", input="x")[1])["data"][0]["probs"] == [0.25, 0.75]
        assert chat(judge, "/nowhere")[0] == 404


async def test_the_fake_judge_stops_while_a_request_stalls() -> None:
    async with aiohttp.ClientSession() as session:
        async with FakeJudge() as judge:
            judge.script(Stall())
            with pytest.raises(TimeoutError):
                await session.post(f"{judge.base_url}/chat/completions", timeout=aiohttp.ClientTimeout(total=0.2))
            async with session.get(f"http://{judge.address}/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "fake-judge"
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://{judge.address}/health")
    assert judge.requests[0].abandoned
