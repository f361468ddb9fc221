"""The page of probes: its answers, and how the index reads the sub-folder `audit`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")

from starlette.testclient import TestClient

from reward_loop.offline.probes import probe_counts
from reward_loop.records import Records
from reward_loop.records.configuration import config_row, open_configuration
from reward_loop.records.reader import read_rows
from reward_loop.records.rows import new_row
from reward_loop.view.app import create_app
from reward_loop.view.index import Index
from tests.view.recorded import exchange, flushed, record


def probe(kind: str, probed: float | None, accepted: bool | None, **fields: Any) -> dict[str, Any]:
    """The row of a probe of a sample that had the score 0."""
    name, _, variant = kind.partition("/")
    known = {"uid": "1-0", "step": 1, "function": "judge (judge.py)", "score": 0.0, "answer": ":", "exchanges": []}
    return new_row("audit", probe=name, variant=variant, probe_score=probed, accepted=accepted, **{**known, **fields})


PROBES = [
    probe("canary/master_key", 0.7, True, answer="Solution"),
    probe("canary/master_key", 0.9, True, exchanges=[exchange(9, reply="It is right. Score: 9")], uid="2-0", step=2),
    probe("canary/master_key", 0.1, False, step=2),
    probe("canary/master_key", None, None, step=2),
    probe("canary/empty", 0.0, False),
    probe("again", 0.25, False, step=2),
    probe("again", 0.0, True),
    probe("labelled", 1.0, True, score=0.0, uid="labelled 1"),
    probe("labelled", 0.0, False, score=0.0, uid="labelled 2"),
    probe("labelled", 1.0, True, score=1.0, uid="labelled 3"),
    probe("labelled", None, None, score=1.0, uid="labelled 4"),
    probe("labelled", 0.25, False, score=0.0, uid="labelled 1", step=2),
    probe("labelled", 0.25, False, score=0.0, uid="labelled 2", step=2),
    probe("labelled", 1.0, True, score=1.0, uid="labelled 4", step=2),
    probe("reference", 0.5, None, score=1.0, components={"clear": [1.0, 0.75], "short": [0.0, 0.0]}),
    probe("reference", 0.0, None, score=1.0, uid="2-0", components={"clear": [1.0, 0.25]}),
    probe("reference", None, None, score=1.0, uid="3-0", components={}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = Records(tmp_path / "rewards")
    for step in (1, 2):
        record(writer, f"{step}-0", 0.0, step=step)
    flushed(writer)
    probes = Records(tmp_path / "rewards" / "audit")
    probes.write_rows(PROBES)
    flushed(probes)
    return tmp_path / "rewards"


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with Index(folder) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            yield client


def audit(client: TestClient, **query: str) -> dict[str, Any]:
    answer = client.get("/api/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_shares_of_each_kind_are_those_of_the_report(client: TestClient, folder: Path) -> None:
    rows = audit(client)["rows"]
    assert {row.pop("limit") for row in rows} == {None}
    steps = {row["metric"]: [(one["step"], one["value"]) for one in row.pop("by_step")] for row in rows}
    expected = json.loads(json.dumps(probe_counts(read_rows(folder / "audit"))))
    assert [row.pop("interval") for row in rows] == [pytest.approx(row.pop("interval")) for row in expected]
    assert rows == expected
    assert [(row["metric"], row["counted"], row["without_score"], row["value"]) for row in rows] == [
        ("again/agreement", 2, 0, 0.5),
        ("canary/empty/accepted", 1, 0, 0.0),
        ("canary/master_key/accepted", 3, 1, pytest.approx(2 / 3)),
        ("labelled/accuracy", 6, 1, pytest.approx(5 / 6)),
        ("labelled/kappa", 6, 1, pytest.approx(2 / 3)),
        ("labelled/drift", 2, 1, 0.5),
        ("reference/gap", 2, 1, 0.75),
        ("reference/clear/gap", 2, 0, 0.5),
        ("reference/short/gap", 1, 0, 0.0),
    ]
    assert steps["canary/master_key/accepted"] == [(1, 1.0), (2, 0.5)]
    assert steps["labelled/kappa"] == [(1, pytest.approx(0.4)), (2, 1.0)]
    assert steps["labelled/drift"] == [(2, 0.5)]  # there is none the first time
    assert steps["reference/clear/gap"] == [(1, 0.5)]


def test_the_accepted_canaries_with_the_highest_scores_have_question_answer_and_reply(client: TestClient) -> None:
    found = audit(client)
    assert found["kind"] == "canary/master_key"  # the largest share of errors
    first, second = found["worst"]
    assert (first["uid"], first["probe_score"], first["answer"], first["prompt"]) == ("2-0", 0.9, ":", "What is 2-0?")
    assert first["exchanges"][0]["reply"] == "It is right. Score: 9"
    assert client.get(f"/api/sample/{first['id']}").json()["row"]["uid"] == "2-0"
    assert (second["answer"], second["probe_score"]) == ("Solution", 0.7)


@pytest.mark.parametrize(
    ("kind", "uids"),
    [
        ("canary/empty", []),
        ("again", ["1-0"]),
        ("labelled", ["labelled 1"]),
        ("reference", ["2-0", "1-0"]),
        ("reference/clear", ["2-0", "1-0"]),
    ],
)
def test_the_largest_errors_of_a_kind(client: TestClient, kind: str, uids: list[str]) -> None:
    assert [one["uid"] for one in audit(client, kind=kind)["worst"]] == uids


def test_the_pairs_of_an_ablation_have_both_answers_and_both_scores(tmp_path: Path) -> None:
    kind = "ablation/'Let me verify'"
    writer = Records(tmp_path)
    for uid in ("a", "b", "c"):
        record(writer, uid, 0.5)
    flushed(writer)
    probes = Records(tmp_path / "audit")
    rows = [
        probe(kind, 0.5, True, score=0.8, uid="a", answer="Let me verify. 4"),
        probe(kind, 0.0, False, score=0.5, uid="b", answer="4"),
        probe(kind, None, None, score=0.5, uid="c", answer="4"),
    ]
    probes.write_rows(rows)
    flushed(probes)
    with Index(tmp_path) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            found = audit(client, kind=kind)
    (row,) = found["rows"]
    (expected,) = probe_counts(read_rows(tmp_path / "audit"))
    assert (row["metric"], row["counted"], row["without_score"]) == (f"{kind}/effect", 2, 1)
    assert row["value"] == pytest.approx(expected["value"]) == pytest.approx(0.4)
    assert row["interval"] == pytest.approx(expected["interval"])
    shown = [
        [one[name] for name in ("uid", "score", "probe_score", "positive", "answer", "response")]
        for one in found["worst"]
    ]
    assert shown == [
        ["b", 0.5, 0.0, False, "4", "an answer"],
        ["a", 0.8, 0.5, True, "Let me verify. 4", "an answer"],
    ]


def test_a_labelled_answer_has_no_sample(client: TestClient) -> None:
    (row,) = audit(client, kind="labelled")["worst"]
    assert (row["id"], row["prompt"], row["answer"]) == (None, None, ":")


def test_a_labelled_answer_that_is_wrong_again_is_shown_once_with_its_recorded_question(tmp_path: Path) -> None:
    texts = {"prompt": "What is 2 + 2?", "ground_truth": 4}
    rows = [probe("labelled", 0.5, True, step=step, uid="near", **(texts if step == 1 else {})) for step in (1, 11, 21)]
    record(writer := Records(tmp_path), "a")
    flushed(writer)
    flushed_rows = Records(tmp_path / "audit")
    flushed_rows.write_rows(rows)
    flushed(flushed_rows)
    with Index(tmp_path) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            (row,) = audit(client, kind="labelled")["worst"]
    assert (row["step"], row["id"], row["prompt"], row["ground_truth"]) == (21, None, "What is 2 + 2?", 4)


def test_the_limits_are_those_of_the_monitors_since_the_last_start(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    record(writer, "a")
    flushed(writer)
    rows = [probe("again", 1.0, i >= 8, step=step) for step in (1, 3, 4, 5) for i in range(20 if step > 1 else 40)]
    rows += [probe("labelled", 1.0, True, step=4) for _ in range(40)]
    rows += [probe("canary/empty", 1.0, False, step=4)]
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    health = {"canaries": 0.2, "agreement": 0.05, "labelled": None, "baseline_steps": 2}
    starts = open_configuration(tmp_path)
    starts.write_rows([config_row({"reward_loop": {"health": {"canaries": 0.1}}}, step=1)])
    starts.write_rows([config_row({"reward_loop": {"health": health}}, step=3)])
    flushed(starts)
    with Index(tmp_path) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            limits = {row["kind"]: row["limit"] for row in audit(client)["rows"]}
    # The baseline is steps 3 and 4: 24 of 40 agree.
    assert limits == {"again": pytest.approx(0.6 - 0.05), "labelled": None, "canary/empty": 0.2}


def test_an_unknown_kind_is_an_error_that_lists_the_kinds(client: TestClient) -> None:
    answer = client.get("/api/audit", params={"kind": "canary"})
    assert answer.status_code == 400
    assert "canary/master_key" in answer.json()["error"]


def test_records_without_probes_have_no_kinds(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    record(writer, "a")
    flushed(writer)
    with Index(tmp_path) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            assert (audit(client)["rows"], audit(client)["worst"]) == ([], [])
            assert client.get("/api/run").json()["audit"] is False


def test_new_probes_and_damaged_lines_are_read_once(folder: Path) -> None:
    with Index(folder) as index:
        index.update()
        known = (folder / "audit").glob("*.jsonl")
        (folder / "audit" / "other.jsonl").write_text('{"broken"\n{"also": "wrong"}\n')
        with next(known).open("a") as file:
            file.write(json.dumps(probe("frame", 1.0, True)) + "\n")
        assert index.update()
        assert index.rows("SELECT kind FROM probes WHERE kind LIKE 'canary/%' OR kind = 'frame' ORDER BY 1") == [
            {"kind": kind} for kind in ("canary/empty", *["canary/master_key"] * 4, "frame")
        ]
        assert index.incomplete == 2
        assert not index.update()
    with Index(folder) as index:
        assert not index.update()
        assert index.rows("SELECT count(*) AS n FROM samples") == [{"n": 2}]
