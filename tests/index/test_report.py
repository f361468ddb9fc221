"""The summary of records, with expected numbers that were computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.index.index import open_index
from reward_loop.index.questions import report as report_of
from reward_loop.records.reader import RecordsReader
from tests.records.rows import sample, write


def exchange(seconds: float, **fields: Any) -> dict[str, Any]:
    return {"id": f"{seconds}", "model": "judge-7b", "status": 200, "seconds": seconds, **fields}


ROWS = [
    sample("a1", group="a", step=1, score=1.0, components={"acc": True, "len": 4}, total_s=1.0),
    sample("a2", group="a", step=1, score=1.0, components={"acc": True, "len": 8}, total_s=9.0, prompt_tokens=70),
    sample(
        "b1",
        group="b",
        step=1,
        score=0.0,
        components={"acc": False, "text": "x"},
        total_s=3.0,
        prompt_tokens=10,
        completion_tokens=50,
        judges=[exchange(0.5, prompt_tokens=10, completion_tokens=50), exchange(1.5, unscored="no 'Score:'")],
    ),
    sample("b2", group="b", step=1, score=None, outcome="failed", masked=True, error="sample b2: f raised: no"),
    sample("c1", group="c", step=2, score=None, outcome="failed", masked=True, error="sample c1: f raised: no"),
    sample("c2", group="c", step=2, score=None, outcome="unscored", masked=True),
    sample("d1", group="d", step=2, score=4.0, validate=True, judges=[exchange(4.0, status=None, error="late")]),
]


def report(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["report", *args])
    assert result.exit_code == code, result.output
    return result.output


def summary(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report(*args, "--json"))
    return found


def test_the_summary_of_a_folder(tmp_path: Path) -> None:
    found = summary(str(write(tmp_path / "r", *ROWS)))
    assert (found["samples"], found["masked"]) == (6, 3)
    assert found["outcomes"] == {"scored": 3, "unscored": 1, "failed": 2}
    assert [(cause["outcome"], cause["count"], cause["cause"], cause["example"]) for cause in found["causes"]] == [
        ("failed", 2, "f raised: no", "sample b2: f raised: no"),
        ("unscored", 1, "unscored", "sample c2: the function returned no score"),
    ]
    score = found["score"]  # 0, 1, 1
    assert (score["count"], score["mean"], score["min"], score["max"]) == (3, pytest.approx(2 / 3), 0.0, 1.0)
    assert score["std"] == pytest.approx((2 / 9) ** 0.5)
    assert (score["p50"], score["p95"]) == (1.0, 1.0)
    validation = found["validation"]
    assert (validation["samples"], validation["outcomes"]["scored"], validation["score"]["mean"]) == (1, 1, 4.0)
    assert (validation["reward"]["mean"], validation["judges"][0]["requests"]) == (4.0, 1)
    assert found["components"]["acc"]["mean"] == pytest.approx(2 / 3)
    assert found["components"]["len"]["mean"] == 6.0
    assert set(found["components"]) == {"acc", "len"}
    # Group a has equal rewards, b one reward and a failure, c none; d has one sample only.
    counts = [found[name] for name in ("groups", "zero_variance", "all_failed", "partly_failed")]
    assert counts == [3, 1, 1, 1]
    (judge,) = found["judges"]
    assert (judge["requests"], judge["errors"], judge["no_verdict"]) == (2, 0, 1)
    assert (judge["seconds"]["p50"], judge["seconds"]["max"]) == (1.0, 1.5)
    assert validation["judges"][0]["errors"] == 1
    assert (judge["prompt_tokens"], judge["completion_tokens"]) == (10, 50)


def test_the_summary_is_printed(tmp_path: Path) -> None:
    shown = " ".join(report(str(write(tmp_path / "r", *ROWS)), "--group-by", "step").split())
    for part in (
        "Training samples 6 outcomes 2 failed, 3 scored, 1 unscored",
        "score mean 0.6667, std 0.4714, min 0, p50 1, p95 1, max 1, of 3",
        "step samples scored unscored failed score std reward 1 4 3 0 1 0.6667 0.4714 0.6667 2 2 0 1 1 - - -",
        "Validation samples 1 outcomes 1 scored score mean 4, std 0, min 4, p50 4, p95 4, max 4, of 1",
        "step samples scored unscored failed score std reward 2 1 1 0 0 4 0 4",
        "- 2 samples failed, first: sample b2: f raised: no",
        "3 groups: 1 with equal rewards, 1 without a reward, 1 with a reward for some samples only",
        "judge-7b 2 0.0% 50.0% 0.0% 1 1.45 1.5 60",
    ):
        assert part in shown


def test_the_cost_that_functions_reported_is_summed(tmp_path: Path) -> None:
    assert summary(str(write(tmp_path / "r", *ROWS)))["reported_cost"] is None
    folder = str(write(tmp_path / "s", *(row | {"cost": 0.5} for row in ROWS[:3]), *ROWS[3:]))
    assert summary(folder)["reported_cost"] == 1.5
    assert "cost 1.5, as reported by functions" in " ".join(report(folder).split())


def test_samples_are_counted_by_a_field(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "r", *ROWS))
    first, second = summary(folder, "--group-by", "step")["parts"]
    assert (first["value"], first["samples"], first["outcomes"]) == (1, 4, {"scored": 3, "unscored": 0, "failed": 1})
    assert first["score"]["mean"] == pytest.approx(2 / 3)
    assert (second["value"], second["score"]["mean"], second["reward"]["mean"]) == (2, None, None)
    (of_validation,) = summary(folder, "--group-by", "step")["validation"]["parts"]
    assert (of_validation["value"], of_validation["reward"]["mean"]) == (2, 4.0)
    parts = summary(folder, "--group-by", "components.acc")["parts"]
    assert {part["value"]: part["samples"] for part in parts} == {False: 1, True: 2}


@pytest.mark.parametrize(
    ("field", "message"),
    [("stp", "Unknown field 'stp'; did you mean 'step'?"), ("components.ac", "no sample has components.ac")],
)
def test_an_unknown_field_is_an_error_with_the_known_ones(tmp_path: Path, field: str, message: str) -> None:
    shown = " ".join(report(str(write(tmp_path / "r", *ROWS)), "--group-by", field, code=2).split())
    assert message in shown


def test_the_causes_of_unscored_samples_are_counted(tmp_path: Path) -> None:
    no_number = [exchange(1.0, unscored="no 'Score:' in the last line")]
    rows = [sample(f"u{i}", outcome="unscored", masked=True, judges=no_number) for i in range(3)]
    rows += [sample("n", outcome="unscored"), sample("f", outcome="failed", error="sample f: f raised: no")]
    found = summary(str(write(tmp_path / "r", *rows)))
    no_verdict = "the judge's reply has no verdict: no 'Score:' in the last line"
    assert [(cause["outcome"], cause["count"], cause["cause"], cause["example"]) for cause in found["causes"]] == [
        ("unscored", 3, "unscored: no ... in the last line", f"sample u0: {no_verdict}"),
        ("failed", 1, "f raised: no", "sample f: f raised: no"),
        ("unscored", 1, "unscored", "sample n: the function returned no score"),
    ]
    assert "- 3 samples unscored, first: sample u0: " in report(str(tmp_path / "r"))


def test_samples_that_ended_the_run_are_neither_masked_nor_rewarded(tmp_path: Path) -> None:
    rows = [
        sample("1", score=1.0, masked=False),
        sample("2", outcome="failed", masked=True, score=None),
        sample("3", outcome="unscored", score=None, masked=False, over_budget=True),
    ]
    found = summary(str(write(tmp_path / "r", *rows)))
    assert (found["masked"], found["stopped"], found["over_budget"]) == (1, 1, 1)
    assert "stopped   1, without a reward: the policy ended the run" in report(str(tmp_path / "r"))


def test_failed_requests_count_for_the_only_model_of_their_server(tmp_path: Path) -> None:
    answered = exchange(1.0, url="http://a/v1")
    failed = exchange(2.0, url="http://a/v1", error="HTTP 500") | {"model": None}
    unknown = exchange(3.0, url="http://b/v1", error="refused") | {"model": None}
    rows = [sample("1", judges=[failed]), sample("2", judges=[answered]), sample("3", judges=[unknown])]
    judges = summary(str(write(tmp_path / "r", *rows)))["judges"]
    assert {judge["model"]: (judge["requests"], judge["errors"]) for judge in judges} == {
        "judge-7b": (2, 1),
        "http://b/v1": (1, 1),
    }


def test_exchanges_of_a_batch_call_are_counted_once(tmp_path: Path) -> None:
    shared = [exchange(1.0), exchange(2.0)]
    rows = [sample(uid, score=1.0, batch="b7", judges=shared) for uid in "abc"]
    assert summary(str(write(tmp_path / "r", *rows)))["judges"][0]["requests"] == 2


def test_incomplete_lines_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", *ROWS, end='{"version": 1, "kind": "samp')
    shown = report(str(folder))
    assert "samples" in shown
    assert "1 incomplete line left out" in shown
    assert summary_of(folder)["samples"] == 6


def summary_of(folder: Path) -> dict[str, Any]:
    with open_index(folder) as index:
        return report_of(index)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.write_text("x"), "it is a file"),
        (lambda path: path.mkdir(), "contains no records"),
        (lambda path: write(path, end='{"version": 1'), "contains no records"),
        (lambda path: write(path, {"uid": "somebody else's"}), "contains no records"),
        (lambda path: write(path, {"version": "1.0", "text": "of another program"}), "contains no records"),
        (lambda path: write(path, {"kind": "sample", "text": "of another program"}), "contains no records"),
        (lambda path: write(path, sample("a", version=2)), "has records of version 2"),
    ],
)
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, prepare: Any, message: str) -> None:
    prepare(tmp_path / "r")
    shown = " ".join(report(str(tmp_path / "r"), code=2).split())
    assert message in shown


def test_texts_that_were_deleted_or_replaced_are_none(tmp_path: Path) -> None:
    place = {"text_file": "texts/a.jsonl", "text_offset": 0, "text_bytes": 18}
    row = sample("a", score=1.0, **place)
    reader = RecordsReader(write(tmp_path / "r", row))
    assert reader.text(row) is None
    write(tmp_path / "r" / "texts", {"id": "id-b", "response": "of another sample"}, name="a.jsonl")
    assert reader.text({**row, "text_bytes": 10_000}) is None
    write(tmp_path / "r" / "texts", {"id": "id-a", "response": "its own"}, name="a.jsonl")
    assert reader.text({**row, "text_bytes": 10_000}) == {"id": "id-a", "response": "its own"}
    assert reader.exchanges({**row, "judges": [exchange(1.0)]}) == [exchange(1.0)]
    (tmp_path / "secret.jsonl").write_text('{"id": "id-a"}\n')
    assert reader.text({**row, "text_file": "../secret.jsonl"}) is None


def test_hostile_texts_do_not_reach_the_terminal_as_markup(tmp_path: Path) -> None:
    rows = [sample("x", score=None, outcome="failed", error="sample [red]x[/]: [bold]f[/] raised")]
    shown = report(str(write(tmp_path / "r", *rows)))
    assert "sample [red]x[/]: [bold]f[/] raised" in shown


def test_control_characters_in_names_are_shown_whole(tmp_path: Path) -> None:
    name = "\x1b[31mred\x1b[0m"
    shown = report(str(write(tmp_path / "r", sample(name, score=1.0, components={name: 1.0}))))
    assert shown.count(r"\x1b[31mred\x1b[0m ") == 1


def test_numbers_whose_squares_are_beyond_the_range_of_float_are_left_out(tmp_path: Path) -> None:
    scores = (2.0, 1.5e308, -1e200, None)
    rows = [sample(f"{i}", score=score, step=i % 2, components={"c": score}) for i, score in enumerate(scores)]
    found = summary_of(write(tmp_path / "r", *rows))
    expected = {"count": 1, "mean": 2.0, "std": 0.0, "min": 2.0, "max": 2.0}
    assert found["score"] == {**expected, **dict.fromkeys(("p10", "p50", "p90", "p95"), 2.0)}
    assert found["components"] == {"c": expected}


def test_exchanges_that_asked_again_are_counted(tmp_path: Path) -> None:
    asked = [exchange(1.0, unscored="no verdict"), exchange(2.0, asked_again=True)]
    folder = write(tmp_path / "r", sample("1", judges=asked), sample("2", judges=[exchange(3.0), exchange(4.0)]))
    assert summary_of(folder)["judges"][0]["asked_again"] == 1
    assert "judge-7b 4 0.0% 25.0% 25.0%" in " ".join(report(str(folder)).split())


def test_names_are_whole_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, model = "format/" + "x" * 90, "organisation/" + "judge" * 20
    rows = [sample("a", score=1.0, components={name: 1.0}, judges=[exchange(1.0) | {"model": model}])]
    monkeypatch.setenv("COLUMNS", "80")
    lines = report(str(write(tmp_path / "r", *rows))).splitlines()
    assert sum(line.startswith((f"{name}  ", f"{model}  ")) for line in lines) == 2


def test_two_scorings_are_joined_by_uid(tmp_path: Path) -> None:
    scores = {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (0.5, 0.75), "d": (1.0, None), "e": (1.0, 1.0)}
    folders = [
        write(tmp_path / name, *(sample(uid, step=1 + (uid > "b"), score=pair[i]) for uid, pair in scores.items()))
        for i, name in enumerate("ab")
    ]
    write(folders[0], sample("only a", step=1, score=1.0), name="more.jsonl")
    found = summary(*map(str, folders))
    assert (found["pairs"], found["both"], found["agreement"]) == (5, 4, 0.5)
    assert found["difference"] == pytest.approx(1.25 / 4)
    # Of the same four samples, without "d", which has no score in B, and "only a".
    assert (found["mean_a"], found["mean_b"]) == (pytest.approx(2.5 / 4), pytest.approx(3.75 / 4))
    assert (found["scored_a"], found["scored_b"]) == (6, 4)
    low, high = found["interval"]
    assert (low + high) / 2 == pytest.approx(found["difference"])
    assert [(part["value"], part["difference"]) for part in found["parts"]] == [(1, 0.5), (2, pytest.approx(0.125))]
    assert [(one["sample"], one["difference"]) for one in found["furthest"]] == [("b", 1.0), ("c", 0.25)]
    shown = " ".join(report(*map(str, folders)).split())
    assert "5 samples in both, 4 with two scores: 50.0% equal" in shown
    assert "b 0 1 1" in shown


def test_scorings_of_validation_are_compared_if_there_are_no_other_samples(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / name, *(sample(f"s{i}", step=1, score=score, validate=True) for i in range(2)))
        for name, score in (("a", 0.0), ("b", 1.0))
    ]
    found = summary(*map(str, folders))
    assert (found["validate"], found["pairs"], found["difference"]) == (True, 2, 1.0)
    assert found["correlation"] is None  # all scores of a folder are equal
    shown = report(*map(str, folders))
    assert "samples of validation: A has no others" in shown
    assert "correlation -" in shown
    training = write(tmp_path / "c", sample("s0", step=1, score=1.0), sample("s1", step=1, score=0.0, validate=True))
    assert summary(str(training), str(folders[1]))["pairs"] == 0


def test_two_runs_without_a_common_sample_are_compared_by_their_means(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / name, *(sample(f"{name}{i}", step=1, score=float(i % 2 or base)) for i in range(4)))
        for name, base in (("a", 0), ("b", 0.5))
    )
    found = summary(str(first), str(second))
    assert (found["pairs"], found["mean_a"], found["mean_b"], found["difference"]) == (0, 0.5, 0.75, 0.25)
    assert found["interval"][0] < 0.25 < found["interval"][1]
    assert "no sample is in both" in report(str(first), str(second))
    assert "name one, or two to compare" in " ".join(report(str(first), str(second), str(first), code=2).split())
