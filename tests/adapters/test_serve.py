"""Requests to `/score`, the key, bounds on samples in flight, clients that disconnect, and the end of the service."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from reward_loop.adapters import serve
from reward_loop.adapters.serve import RewardService
from reward_loop.records.reader import RecordsReader
from tests.adapters.services import Centred, client_of, post, ranks, scorer
from tests.scoring.logging_functions import logging_function
from tests.support.servers import serving, until

BODY = {"solution_str": "4", "ground_truth": "4"}


def sample(answer: str, **fields: Any) -> dict[str, Any]:
    return {"solution_str": answer, "ground_truth": "4", **fields}


def in_groups(*samples: tuple[str, str]) -> dict[str, Any]:
    return {"samples": [{"solution_str": text, "group": group} for text, group in samples]}


async def test_samples_have_results_in_their_order_with_separate_outcomes() -> None:
    async with client_of() as client:
        one = await post(client, sample("4", uid="a"))
        many = await post(client, {"samples": list(map(sample, ("4", "raise", "none", "nan", "5")))})
    assert (one["uid"], one["score"], one["outcome"], one["error"]) == ("a", 1.0, "scored", None)
    assert (one["components"], one["reward_extra_info"]["length"]) == ({"length": 1.0}, 1)
    results = many["results"]
    assert [result["score"] for result in results] == [1.0, None, None, None, 0.0]
    assert [result["outcome"] for result in results] == ["scored", "failed", "unscored", "failed", "scored"]
    for result, reason in zip(results[1:4], ("ValueError: five", "gave no score", "not finite"), strict=True):
        assert reason in result["error"]
    assert len({result["uid"] for result in results}) == 5


async def test_the_policies_give_a_number_or_an_error_that_names_sample_and_function() -> None:
    async with client_of(scorer(on_failed="default", default_score=-1, on_unscored="raise")) as client:
        result = await post(client, sample("raise"))
        error = await post(client, sample("none", uid="a7"), 500)
    assert (result["score"], result["outcome"]) == (-1.0, "failed")
    assert "a7" in error["error"]
    assert "equals" in error["error"]


async def test_the_samples_of_a_group_are_scored_together_in_any_order() -> None:
    body = in_groups(("aaa", "x"), ("d", "y"), ("b", "x"), ("ee", "y"), ("cc", "x"))
    async with client_of(scorer(ranks, "group")) as client:
        # The groups of another request with the same names are other groups.
        for replies in await asyncio.gather(*(post(client, body) for _ in range(2))):
            assert [result["score"] for result in replies["results"]] == [2, 0, 0, 1, 1]
        error = await post(client, {"samples": [{"solution_str": "a"}]}, 422)
    assert "sample 0 has no group, and ranks" in error["error"]
    async with client_of(scorer(ranks, "group"), concurrency=2) as client:
        error = await post(client, in_groups(*[("a", "x")] * 3), 422)
    assert "concurrency must be at least 3" in error["error"]


async def test_post_process_scores_gets_the_scored_members_of_each_group() -> None:
    async with client_of(scorer(Centred)) as client:
        results = (await post(client, in_groups(("a", "x"), ("raise", "x"), ("bb", "y"), ("ccc", "x"))))["results"]
        assert [result["score"] for result in results] == [-1, None, 0, 1]
        assert "Centred" in (await post(client, {"solution_str": "a"}, 422))["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "sample 0 has no ground_truth, which equals"),
        (sample("4", solutoin_str="4"), "sample 0 has an unknown field 'solutoin_str'; did you mean 'solution_str'?"),
        (sample(4), "sample 0, solution_str: Input should be a valid string"),  # type: ignore[arg-type]
        (sample("4", response_ids=["a"]), "sample 0, response_ids.0: Input should be a valid integer"),
        ({"samples": []}, "samples must be a list with at least one sample"),
        ({"samples": [sample("4"), {"ground_truth": 1}]}, "sample 1, solution_str: Field required"),
        ({"samples": ["4"]}, "sample 0 must be an object with solution_str"),
        ([], "sample 0 must be an object with solution_str"),
        ({"samples": [sample("4")], "step": 3}, "unknown field 'step' beside samples"),
    ],
)
async def test_invalid_bodies_are_errors_that_name_sample_and_field(body: Any, message: str) -> None:
    async with client_of() as client:
        assert message in (await post(client, body, 422))["error"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"solution_str": "4",}', b"[" * 100_000])
async def test_a_body_that_is_not_json_is_an_error(content: bytes) -> None:
    async with client_of() as client:
        answer = await client.post("/score", content=content)
    assert (answer.status_code, answer.json()["error"][:20]) == (400, "the body is not JSON")


async def test_samples_are_recorded_with_group_step_and_prompt(tmp_path: Path) -> None:
    made = scorer(log_dir=str(tmp_path))
    async with client_of(made) as client:
        await post(client, {"samples": [sample("4", prompt="2+2", step=3, group="x", uid=uid) for uid in "ab"]})
    made.manager.records.flush()
    rows = list(RecordsReader(tmp_path).rows())
    assert {(row["uid"], row["step"]) for row in rows} == {("a", 3), ("b", 3)}
    assert len({row["group"] for row in rows}) == 1


ASKED = {
    "prompt": "2+2=",
    "response_ids": [19, 2],
    "response_length": 2,
    "is_truncated": False,
    "global_steps": 3,
    "training_progress": 0.5,
    "validate": True,
    "data_source": "sums",
}


@pytest.mark.parametrize("name", ASKED)
async def test_requests_give_the_arguments_that_a_function_asks_for(name: str) -> None:
    seen: list[Any] = []
    function = logging_function(name, seen)
    body = {"solution_str": "4", **{"step" if key == "global_steps" else key: value for key, value in ASKED.items()}}
    del body["response_length"]  # of `response_ids`
    async with client_of(scorer(function)) as client:
        await post(client, body)
        error = await post(client, {"solution_str": "4"}, 422)
    assert seen == [ASKED[name]]
    assert f"has no {'step' if name == 'global_steps' else name}, which" in error["error"]


# --- The key, web pages, long bodies


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bearer kéy", 200),
        ("Basic " + base64.b64encode("user:kéy".encode()).decode(), 200),
        ("Basic " + base64.b64encode("kéy:other".encode()).decode(), 401),
        ("Basic !", 401),
        ("Bearer other", 401),
        (None, 401),
    ],
)
async def test_requests_need_the_key(header: str | None, status: int) -> None:
    challenge = "Bearer" if status == 401 else None
    async with client_of(key="kéy") as client:
        headers = {} if header is None else {"authorization": header.encode()}
        answer = await client.post("/score", json=BODY, headers=headers)  # type: ignore[arg-type]
        assert (answer.status_code, answer.headers.get("www-authenticate")) == (status, challenge)
        assert status == 200 or "bearer token" in answer.json()["error"]
        assert (await client.get("/health")).status_code == 200
        other = await client.get("/score")
        assert (other.status_code, other.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}], ids=str
)
async def test_without_a_key_web_pages_are_refused(headers: dict[str, str]) -> None:
    async with client_of() as client:
        answer = await client.post("/score", json=BODY, headers=headers)
        assert (answer.status_code, "--api-key-env" in answer.json()["error"]) == (403, True)
        own = {"Origin": "http://localhost:8090", "Host": "localhost:8090"}
        assert (await client.post("/score", json=BODY, headers=own)).status_code == 200
    async with client_of(key="key") as client:
        answer = await client.post("/score", json=BODY, headers={"authorization": "Bearer key", **headers})
        assert answer.status_code == 200


async def test_a_body_that_is_too_long_is_an_error_also_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b'{"response": "' + b"x" * 1000

    monkeypatch.setattr(serve, "MAX_BODY_BYTES", 10_000)
    async with client_of() as client:
        for content in (b"x" * 10_001, chunks()):
            answer = await client.post("/score", content=content)
            assert answer.status_code == 413
            assert "longer than 10000 bytes" in answer.json()["error"]
        await post(client, BODY)


# --- Samples in flight


class Held:
    """An async function whose calls wait until `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def compute_score(self, solution_str: str) -> float:
        self.started.put_nowait(solution_str)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(solution_str)
            raise
        return 1.0


async def test_requests_beyond_the_samples_in_flight_are_refused_until_there_is_room() -> None:
    held = Held()
    async with client_of(scorer(held.compute_score), concurrency=1, max_in_flight=2) as client:
        first = asyncio.create_task(post(client, {"samples": [{"solution_str": "a"}, {"solution_str": "b"}]}))
        assert await held.started.get() == "a"
        answer = await client.post("/score", json={"solution_str": "c"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "2 samples are in flight" in answer.json()["error"]
        too_many = {"samples": [{"solution_str": "a"}] * 3}
        assert "has 3 samples, and at most 2" in (await post(client, too_many, 413))["error"]
        held.release.set()
        assert [result["score"] for result in (await first)["results"]] == [1, 1]
        assert (await post(client, {"solution_str": "c"}))["score"] == 1


async def test_a_client_that_disconnects_cancels_its_samples_only() -> None:
    held = Held()
    service = RewardService(scorer(held.compute_score), concurrency=2)
    async with service, serving(service) as url, aiohttp.ClientSession(url) as session:

        async def ask(response: str) -> Any:
            async with session.post("/score", json={"solution_str": response}) as answer:
                return (await answer.json())["score"]

        leaves, stays = asyncio.create_task(ask("leaves")), asyncio.create_task(ask("stays"))
        assert {await held.started.get(), await held.started.get()} == {"leaves", "stays"}
        leaves.cancel()
        assert await held.cancelled.get() == "leaves"
        held.release.set()
        assert await stays == 1.0
        assert held.cancelled.empty()
    assert service.in_flight == 0


@pytest.fixture
async def accepted() -> AsyncIterator[Any]:
    """Start a service that has accepted the sample ``a``; return it, its function, a client and the result."""
    held = Held()
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> tuple[RewardService, httpx.AsyncClient, asyncio.Task[Any]]:
            service = await stack.enter_async_context(RewardService(scorer(held.compute_score), **options))
            app = httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost")
            client = await stack.enter_async_context(app)
            score = asyncio.create_task(client.post("/score", json={"solution_str": "a"}))
            await held.started.get()
            return service, client, score

        yield start, held


async def test_samples_in_flight_end_after_a_signal_and_new_ones_are_refused(accepted: Any) -> None:
    start, held = accepted
    service, client, score = await start(grace_s=600)
    ended: list[int] = []
    service.stop_from_signal(lambda: ended.append(service.in_flight))
    await until(lambda: service.stopping)
    for answer in (await client.post("/score", json={"solution_str": "b"}), await client.get("/health")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == {"error": "the service is stopping"}
    assert ended == []
    held.release.set()
    assert (await score).json()["score"] == 1.0
    assert ended == [0]


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_after_the_grace_period_or_a_second_signal_samples_are_cancelled(accepted: Any, grace_s: int) -> None:
    start, held = accepted
    service, _, score = await start(grace_s=grace_s)
    service.stop_from_signal(lambda: None)
    if grace_s:
        service.stop_from_signal(lambda: None)
    stopped = await score
    assert (stopped.status_code, "stopped before all samples were scored" in stopped.text) == (503, True)
    assert await held.cancelled.get() == "a"
    assert service.in_flight == 0
