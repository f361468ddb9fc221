"""The server of the viewer: its answers, rejected requests, and records with hostile content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.index.index import Index
from reward_loop.records import Records, resumed_row
from reward_loop.records.reader import RecordsReader
from reward_loop.records.trainer_events import HealthRecords
from reward_loop.view.app import Guard, create_app
from tests.support import made_up
from tests.support.recorded import exchange, flushed, record

HOSTILE = "<script>alert(1)</script> \x1b[31m \ud800 \x00 \u2028 ünï"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training, with two groups of four, and validation."""
    path = tmp_path_factory.mktemp("run") / "rewards"
    writer = Records(path)
    for step in (1, 2):
        for number in range(8):
            record(
                writer,
                f"{step}-{number}",
                {(1, 0): 9.0, (1, 7): None, (2, 7): None}.get((step, number), number / 10),
                step=step,
                group=f"g{number // 4}",
                data_source="math" if number % 2 else "code",
                response=f"answer {number} {'Ünïcode' if number == 3 else ''}",
                components={"acc": float(number % 2), "text": f"t{number}", "a/b": number} if number else {},
                exchanges=[exchange(number)] if number < 6 else [],
                response_length=number,
            )
    record(writer, "hostile", None, step=3, response=HOSTILE, error=HOSTILE, exchanges=[exchange(9, reply=HOSTILE)])
    record(writer, "large", 1.0, step=3, response="x" * 5_000_000 + "needle")
    record(writer, "v", 1.0, step=2, validate=True)
    record(writer, "short", 1.0, step=3, full=0.0)
    flushed(writer)
    return path


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with Index(folder) as index:
            index.update()
            with TestClient(Guard(create_app(index), {"localhost"}, None), base_url="http://localhost") as client:
                yield client


@contextmanager
def serving(folder: Path) -> Iterator[TestClient]:
    """A client of the viewer of a folder."""
    with Index(folder) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            yield client


def get(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def uids(found: dict[str, Any]) -> list[str]:
    return [row["uid"] for row in found["rows"]]


def test_run(client: TestClient, folder: Path) -> None:
    run = get(client, "run")
    assert run["folder"] == str(folder)
    assert run["samples"] == 20
    assert run["steps"] == [1, 2, 3]
    assert run["training"] == {"samples": 19, "outcomes": {"scored": 16, "unscored": 0, "failed": 3}}
    assert run["validation"] == {"samples": 1, "outcomes": {"scored": 1, "unscored": 0, "failed": 0}}
    assert run["components"] == ["a/b", "acc", "text"]
    assert run["functions"] == ["compute_score (reward.py)"]
    assert set(run["data_sources"]) >= {"code", "math"}
    assert run["models"] == ["judge-7b"]
    assert run["following"] is True
    assert run["events"] is False
    assert (run["incomplete"], run["notes"]) == (0, [])
    assert run["revision"] > 0
    assert run["first_time"] <= run["last_time"]


def test_steps(client: TestClient) -> None:
    first, second, third = get(client, "steps")["rows"]
    assert (first["step"], first["samples"], first["groups"]) == (1, 8, 2)
    assert first["outcomes"] == {"scored": 7, "unscored": 0, "failed": 1}
    assert first["reward"]["max"] == 9.0
    assert second["reward"]["p50"] == pytest.approx(0.3)
    means = {name: values["mean"] for name, values in second["components"].items()}
    assert means == {"acc": pytest.approx(4 / 7), "a/b": 4.0}
    assert (second["prompt_tokens"], third["prompt_tokens"]) == (60, 10)
    assert (first["phases"], first["hidden_share"], first["waiting_s"], first["warnings"]) == (None, None, None, [])
    (validation,) = get(client, "steps", validate="true")["rows"]
    assert validation["samples"] == 1


def test_samples_are_filtered_and_sorted(client: TestClient) -> None:
    assert get(client, "samples")["total"] == 20
    assert uids(get(client, "samples", step=2, validate="false")) == [f"2-{n}" for n in range(8)]
    assert uids(get(client, "samples", step=1, sort="reward", order="desc"))[:2] == ["1-0", "1-6"]
    assert uids(get(client, "samples", step=1, sort="reward", order="desc"))[-1] == "1-7"  # without a reward
    assert uids(get(client, "samples", step=2, sort="components.a/b", order="desc", limit=2)) == ["2-7", "2-6"]
    page = get(client, "samples", step=2, validate="false", limit=3, offset=6)
    assert (page["total"], page["offset"], uids(page)) == (8, 6, ["2-6", "2-7"])
    assert uids(get(client, "samples", step=2, group="g1", outcome="failed")) == ["2-7"]
    assert uids(get(client, "samples", step=2, min_reward=0.2, max_reward=0.3)) == ["2-2", "2-3"]
    assert uids(get(client, "samples", **{"step": 2, "min.response_length": 6})) == ["2-6", "2-7"]
    assert uids(get(client, "samples", **{"step": 2, "min.components.a/b": 3, "max.components.a/b": 4})) == [
        "2-3",
        "2-4",
    ]
    assert uids(get(client, "samples", **{"step": 2, "min.components.text": 0})) == []  # a text is not a number
    assert (
        uids(get(client, "samples", **{"step": 2, "validate": "false", "max.judge_s": 1e9, "min.judge_s": 0.1}))[-1]
        == "2-5"
    )
    assert uids(get(client, "samples", step=2, data_source="math")) == ["2-1", "2-3", "2-5", "2-7"]
    assert uids(get(client, "samples", **{"step": 2, "where.components.acc": "1"}))[0] == "2-1"
    assert uids(get(client, "samples", **{"step": 2, "where.components.text": "t5"})) == ["2-5"]
    assert uids(get(client, "samples", **{"where.uid": "2-5"})) == ["2-5"]
    (row,) = get(client, "samples", **{"where.response_length": "5", "step": "1"})["rows"]
    assert (row["uid"], row["components"]) == ("1-5", {"acc": 1.0, "text": "t5", "a/b": 5})
    assert (row["judges"], row["judge_s"], row["attempts"], row["group"]) == (1, 0.5, 1, "g1")


@pytest.mark.parametrize("sort", ["reward", "group", "masked", "components.acc", "components.text", "time"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_previous_and_next_are_the_neighbours_in_the_table(client: TestClient, sort: str, order: str) -> None:
    query = {"sort": sort, "order": order, "validate": "false"}
    names = [row["id"] for row in get(client, "samples", **query)["rows"]]
    assert len(names) == 19
    for number in (0, 1, 8, 18):
        found = get(client, f"sample/{names[number]}", **query)
        assert found["previous"] == (names[number - 1] if number else None)
        assert found["next"] == (names[number + 1] if number < 18 else None)


def test_text_search_finds_prompts_responses_and_replies(client: TestClient) -> None:
    assert uids(get(client, "samples", text="WHAT IS 2-5?")) == ["2-5"]
    assert uids(get(client, "samples", text="answer 4")) == ["1-4", "2-4"]
    assert uids(get(client, "samples", text="Ünïcode")) == ["1-3", "2-3"]
    assert uids(get(client, "samples", text="Score: 5", step=1)) == ["1-5"]
    assert uids(get(client, "samples", text="needle")) == ["large"]
    assert uids(get(client, "samples", text="<script>")) == ["hostile"]
    assert get(client, "samples", text="ground_truth")["total"] == 0  # a name of a field, not a text
    assert get(client, "samples", text="nowhere") == {"total": 0, "offset": 0, "rows": []}


def test_a_sample_has_its_whole_row_texts_exchanges_and_group(client: TestClient, folder: Path) -> None:
    (row,) = (row for row in RecordsReader(folder).rows() if row["uid"] == "1-0")
    found = get(client, f"sample/{row['id']}")
    assert found["row"] == json.loads(json.dumps(row))
    assert found["row"]["reward"] == 9.0
    assert found["texts"]["response"].startswith("answer 0")
    assert found["exchanges"][0]["reply"] == "Let me see. Score: 0"
    assert [one["uid"] for one in found["group"]] == ["1-0", "1-1", "1-2", "1-3"]
    assert found["previous"] is None
    assert found["next"] == found["group"][1]["id"]


def test_hostile_and_large_texts_are_returned_as_they_are(client: TestClient) -> None:
    (row,) = get(client, "samples", **{"where.uid": "hostile"})["rows"]
    answer = client.get(f"/api/sample/{row['id']}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["texts"]["response"] == HOSTILE.replace("\ud800", "\\ud800")
    (row,) = get(client, "samples", **{"where.uid": "large"})["rows"]
    assert len(get(client, f"sample/{row['id']}")["texts"]["response"]) == 5_000_006
    (row,) = get(client, "samples", **{"where.uid": "short"})["rows"]
    assert get(client, f"sample/{row['id']}")["texts"] is None


def test_groups(client: TestClient) -> None:
    found = get(client, "groups", step=2, sort="mean", order="desc")
    assert found["total"] == 2
    first, second = found["rows"]
    assert (first["group"], first["count"], first["scored"], first["failed"]) == ("g1", 4, 3, 1)
    assert first["min"] == pytest.approx(0.4)
    assert (first["zero_variance"], first["all_failed"]) == (False, False)
    assert second["prompt"] == "What is 2-0?"
    assert get(client, "groups", step=99) == {"total": 0, "offset": 0, "rows": []}


def test_requests_that_could_write_are_rejected(client: TestClient) -> None:
    for headers, status in (({}, 405), ({"host": "evil.example"}, 400)):
        assert client.post("/api/run", json={}, headers=headers).status_code == status


def test_judges(client: TestClient) -> None:
    (judge,) = get(client, "judges")["rows"]
    assert (judge["model"], judge["backend"]) == ("judge-7b", "http://10.0.0.1:2")
    assert judge["requests"] == 13
    assert [row["step"] for row in judge["by_step"]] == [1, 2, 3]
    first = judge["by_step"][0]
    assert (first["mean_score"], first["scores"]) == (2.5, {"p10": 0.5, "p90": 4.5})
    assert get(client, "judges", step=2)["rows"][0]["requests"] == 6


def test_the_live_numbers_and_their_warnings(client: TestClient, tmp_path: Path) -> None:
    assert get(client, "health") == {"warnings": []}
    made_up.write(tmp_path / "rewards", [], [made_up.row("u_0", 1.0, 3.0)])
    fields = {"step": 1, "monitor": "masked_share", "value": 0.9, "threshold": 0.5, "since": 1}
    health = HealthRecords(tmp_path / "rewards")
    health.write_warnings([{"message": "90 % of the samples are masked", **fields}])
    health.write_values(1, {"masked_share": 0.9})
    flushed(health)
    with serving(tmp_path / "rewards") as client:
        assert get(client, "health")["warnings"] == [{"message": "90 % of the samples are masked", **fields}]
        (step,) = get(client, "steps")["rows"]
        assert (step["warnings"], step["live"]) == (["90 % of the samples are masked"], {"masked_share": 0.9})


def test_the_advantage_is_that_of_the_last_row_of_a_repeated_uid(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    for reward in (1.0, 2.0):
        record(writer, "same", reward)
        flushed(writer)
    writer.write_advantages(1, {"same": 0.25})
    flushed(writer)
    with serving(tmp_path) as client:
        shown = [get(client, f"sample/{row['id']}")["row"] for row in get(client, "samples")["rows"]]
        assert [(row["reward"], row.get("advantage")) for row in shown] == [(1.0, None), (2.0, 0.25)]


@pytest.mark.parametrize(
    "query",
    [
        "samples?sort=nothing",
        "samples?order=up",
        "samples?limit=many",
        "samples?offset=9223372036854775808",
        "samples?step=one",
        "samples?min_reward=low",
        "samples?max.outcome=1",
        "samples?validate=maybe",
        "samples?where.nothing=1",
        "samples?where.components.=1",
        "samples?sort=reward%22%3B%20DROP%20TABLE%20samples%3B",
        "groups?sort=prompt",
        "timeline",
    ],
)
def test_a_wrong_parameter_is_an_error_of_status_400(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]


def test_a_step_without_samples_has_its_phases_and_warnings(tmp_path: Path) -> None:
    """In the mode `reward_pipeline` with one step ahead, the last step trains on the samples of the step before."""
    writer = HealthRecords(tmp_path / "run")
    warning = {"monitor": "repetition", "message": "a jump", "value": 1.0, "threshold": 0.5, "since": 3}
    writer.write_warnings([{"step": 3, **warning}])
    assert writer.flush()
    events = made_up.phases(2, ("update_actor", 4.0, 9.0), ("step", 0.0, 10.0))
    rows = [made_up.row("a_0", 1.0, 2.0), made_up.row("b_0", 1.0, 2.0, step=None)]
    with serving(made_up.write(tmp_path / "run", events, rows)) as client:
        found = get(client, "steps")["rows"]
        assert [(row["step"], row["samples"]) for row in found] == [(1, 1), (2, 0), (3, 0), (None, 1)]
        assert found[1]["phases"]["update_actor"] == 5.0
        assert found[2]["warnings"] == ["a jump"]
        assert found[1].keys() == found[0].keys()
        assert found[1]["reward"].keys() == found[0]["reward"].keys()
        assert [row["step"] for row in get(client, "steps", validate="true")["rows"]] == []


def test_steps_that_a_resumed_run_will_do_again_show_no_times(tmp_path: Path) -> None:
    """A trainer was killed in step 4, and another one, from the checkpoint of step 1, has done step 2."""

    def step(number: int, end: float, waiting_s: float) -> list[dict[str, Any]]:
        overlap = made_up.overlap(number, waiting_s, 10.0) | {"time": end}
        return [*made_up.phases(number, ("step", end - 10, end)), overlap]

    before = [event for number in (1, 2, 3) for event in step(number, 10.0 * number, 5.0)]
    resumed = resumed_row(1, set()) | {"time": 50.0}
    folder = made_up.write(tmp_path / "run", before, [made_up.row("a_0", 1.0, 2.0)])
    with serving(folder) as client:
        assert [row["hidden_share"] for row in get(client, "steps")["rows"]] == [0.5] * 3
    made_up.write(folder, step(2, 60.0, 1.0), [resumed], process="host-2-b")
    with serving(folder) as client:
        found = {row["step"]: (row["hidden_share"], row["phases"]) for row in get(client, "steps")["rows"]}
    assert found == {1: (0.5, {"other": 10.0}), 2: (0.9, {"other": 10.0})}
    shown = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert "judging hidden: 70.0% in 2 steps, 90.0% in the last one" in shown.output


@pytest.mark.parametrize("value", ["'", '"', "\\", "%", "x'--", "\x00", "a/b~c", "1e999", "nan", "\ud800"])
def test_names_and_values_of_filters_cannot_inject_sql(client: TestClient, value: str) -> None:
    text = value.encode("utf-8", "surrogatepass")
    for name in ("text", "group", "where.uid", "where.components.acc"):
        answer = client.get("/api/samples", params={name: text})
        assert answer.status_code == 200, answer.text
    for filtered in ("where", "min", "max"):
        name = f"{filtered}.components.{value.replace(chr(0xD800), 'x')}"
        answer = client.get("/api/samples", params={name: "1"})
        assert answer.status_code == 200, answer.text
    assert get(client, "run")["samples"] == 20


def test_unknown_samples_and_routes_have_status_404(client: TestClient) -> None:
    for path in ("sample/nothing", "sample/%2e%2e/%2e%2e/etc/passwd", "nothing"):
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]


def test_path_traversal_reads_no_file_outside_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text(json.dumps({"id": "id-a_0", "response": "secret", "sample": "id-a_0", "reply": "secret"}) + "\n")
    size = secret.stat().st_size
    places = {
        f"{kind}_{field}": value for kind in ("text", "exchange") for field, value in (("offset", 0), ("bytes", size))
    }
    rows = []
    for number, path in enumerate(["../secret.jsonl", str(secret), "texts/../../secret.jsonl"]):
        files = {"text_file": path, "exchange_file": path}
        rows.append(made_up.row(f"a_{number}", 1.0, 2.0, **places, **files) | {"id": "id-a_0"})
    made_up.write(tmp_path / "rewards", [], rows)
    with serving(tmp_path / "rewards") as client:
        assert "secret" not in json.dumps(get(client, "sample/id-a_0")["texts"])
        assert get(client, "sample/id-a_0")["exchanges"] == []
        assert get(client, "samples", text="secret")["total"] == 0
        assert get(client, "groups")["rows"][0]["prompt"] is None
        for path in ("/../secret.jsonl", "/%2e%2e/secret.jsonl", "/..%2fsecret.jsonl", f"/{secret}"):
            assert "secret" not in client.get(path).text


def test_every_answer_has_a_content_security_policy(client: TestClient) -> None:
    for path in ("/api/run", "/api/nothing", "/", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"


def test_a_host_name_that_is_not_the_servers_is_rejected(client: TestClient) -> None:
    for host in ("evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example", "10.0.0.1"):
        answer = client.get("/api/run", headers={"host": host})
        assert answer.status_code == 400, host
    assert client.get("/api/run", headers={"host": "LOCALHOST:1234"}).status_code == 200


@pytest.mark.parametrize("key", ["a secret key", 'k;é",y'])
def test_the_key_is_needed_and_may_be_a_cookie(folder: Path, key: str) -> None:
    with Index(folder) as index:
        index.update()
        guarded = Guard(create_app(index), {"localhost"}, key)
        with TestClient(guarded, base_url="http://localhost", follow_redirects=False) as client:
            for path in ("/api/run", "/", "/?key=wrong", "/api/changes"):
                refused = client.get(path)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert client.get("/api/run", headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get("/api/run", headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
            answer = client.get("/", params={"key": key})
            assert (answer.status_code, answer.headers["location"]) == (303, "/")
            assert "HttpOnly" in answer.headers["set-cookie"]
            assert client.get("/api/run").status_code == 200  # with the cookie


def test_deleted_texts_and_rows_are_missing_not_errors(tmp_path: Path) -> None:
    writer = Records(tmp_path / "rewards")
    record(writer, "a", 1.0, group="g", exchanges=[exchange(1)])
    flushed(writer)
    with serving(tmp_path / "rewards") as client:
        for path in (tmp_path / "rewards").rglob("*.jsonl"):
            os.unlink(path)
        (row,) = get(client, "samples")["rows"]
        assert client.get(f"/api/sample/{row['id']}").status_code == 404
        assert get(client, "samples", text="answer")["total"] == 0
        assert get(client, "run")["samples"] == 1
