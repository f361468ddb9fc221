"""Comparing two scorings, with expected numbers that were computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.offline.compare import agreement, cohens_kappa, pearson, read_scoring, spearman
from tests.records.rows import sample, write

# Of five pairs, four are equal: p_o = 0.8. A has 3 ones of 5, B has 2: p_e = (3*2 + 2*3) / 25 = 0.48.
BINARY = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]


def compare(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["compare", *args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def scored(folder: Path, scores: list[Any], **columns: list[Any]) -> str:
    """Write a folder of samples with these scores; those without a score failed."""
    rows = (
        sample(
            f"line {i}",
            score=score,
            outcome="failed" if score is None else "scored",
            **{name: values[i] for name, values in columns.items()},
        )
        for i, score in enumerate(scores)
    )
    return str(write(folder, *rows))


def test_kappa_is_the_agreement_beyond_chance() -> None:
    assert cohens_kappa(BINARY) == pytest.approx((0.8 - 0.48) / 0.52)
    assert cohens_kappa([(1.0, 0.0), (0.0, 1.0)]) == pytest.approx(-1.0)
    assert cohens_kappa([(1.0, 1.0)] * 3) is None
    assert cohens_kappa([]) is None
    assert cohens_kappa([(float(i), float(i)) for i in range(21)]) is None
    assert cohens_kappa([(float(i), float(i)) for i in range(20)]) == pytest.approx(1.0)


def test_correlations() -> None:
    # Deviations of 1, 2, 3 are -1, 0, 1; of 1, 4, 1 they are -1, 2, -1: the products add up to 0.
    assert pearson([(1, 1), (2, 4), (3, 1)]) == pytest.approx(0.0)
    assert pearson([(1, 2), (2, 4), (3, 6)]) == pytest.approx(1.0)
    assert spearman([(1, 1), (2, 8), (3, 27)]) == pytest.approx(1.0)
    # Ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3: covariance 4.5, variances 4.5 and 5.
    assert spearman([(1, 1), (2, 2), (2, 3), (3, 4)]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert pearson([(1, 1), (1, 2)]) is None
    assert pearson([(1, 1)]) is None


def test_a_threshold_makes_two_categories() -> None:
    pairs = [(0.9, 0.7), (0.8, 0.2), (0.1, 0.3), (0.2, 0.0), (0.6, 0.5)]
    found = agreement(pairs, threshold=0.5)
    assert (found.pairs, found.equal) == (5, 0.8)
    assert found.kappa == pytest.approx((0.8 - 0.48) / 0.52)
    assert agreement(pairs).equal == 0.0


def test_two_scorings_are_compared(tmp_path: Path) -> None:
    labels = [1, 1, 0, True, "0.0", 1, None]
    a = scored(tmp_path / "a", [1.0, 1.0, 0.0, 0.0, 1.0, None, 1.0], label=labels)
    b = scored(tmp_path / "b", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    found = json.loads(compare(a, b, "--label", "label", "--json"))
    assert (found["both"], found["only_a"], found["only_b"], found["changed"]) == (6, 1, 0, 2)
    assert {"a": "failed", "b": "scored", "samples": 1} in found["outcomes"]
    assert (found["mean_a"], found["mean_b"]) == (0.6, 0.4)
    assert found["agreement"]["pairs"] == 5
    assert found["agreement"]["kappa"] == pytest.approx((0.8 - 0.48) / 0.52)
    # A: rows 0 to 4 have the labels 1, 1, 0, 1, 0 and the scores 1, 1, 0, 0, 1: three of five are equal.
    # p_e = (3*3 + 2*2) / 25 = 0.52.
    assert (found["label_a"]["pairs"], found["label_a"]["equal"]) == (5, 0.6)
    assert found["label_a"]["kappa"] == pytest.approx((0.6 - 0.52) / 0.48)
    # B: scores 1, 0, 0, 0, 1, 1 and labels 1, 1, 0, 1, 0, 1: three of six.
    assert (found["label_b"]["pairs"], found["label_b"]["equal"]) == (6, 0.5)
    assert found["largest"] == [{"sample": "line 1", "a": 1.0, "b": 0.0}]
    assert found["moved"] == [{"sample": "line 5", "a": "failed", "b": "scored"}]


def test_the_comparison_is_printed(tmp_path: Path) -> None:
    a = scored(tmp_path / "a", [1.0, 1.0, 0.0, 0.0, 1.0, None], name=list("uvwxyz"))
    b = scored(tmp_path / "b", [1.0, 0.25, 0.0, 0.0, 0.0, 1.0], name=list("uvwxyz"))
    shown = compare(a, b, "--on", "name", "--largest", "1", "--threshold", "0.2")
    for part in (
        "samples 6 in both, 0 only in A, 0 only in B",
        "changed 3 of 6 1 failed in A, scored in B",
        "mean score A 0.6, B 0.25",
        "A and B 5 80.0% 0.6154",
        "largest differences A B y 1 0",
        "changed outcomes A B z failed scored",
    ):
        assert part in shown
    assert "v 1 0.25" not in shown


def test_of_several_records_of_a_sample_the_latest_counts(tmp_path: Path) -> None:
    for file, time, score in (("z", 1.0, 0.0), ("a", 2.0, 1.0), ("b", 1.5, 0.5)):  # files are read by name
        write(tmp_path, sample("s", id=file, time=time, score=score), name=f"{file}.jsonl")
    assert read_scoring(tmp_path).scores == {"s": 1.0}
    assert read_scoring(tmp_path).duplicates == 2


def test_two_folders_of_records_are_compared_by_uid(tmp_path: Path) -> None:
    text = {"id": "id-q1", "ground_truth": "3", "extra_info": {"label": 1}}
    place = {"text_file": "texts/a.jsonl", "text_offset": 0, "text_bytes": len(json.dumps(text)) + 1}
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, sample("q1", score=0.0, **place), sample("q2", score=1.0), sample("q1", score=1.0, **place))
    write(a / "texts", text, name="a.jsonl")
    write(b, sample("q2", score=1.0), sample("q1", score=0.0), sample("q3", score=0.0))
    shown = compare(str(a), str(b), "--label", "extra_info.label")
    assert "samples 2 in both, 0 only in A, 1 only in B" in shown
    assert "changed 1 of 2" in shown
    assert "A and extra_info.label 1 100.0%" in shown
    assert "has 1 record with the uid of another one: the latest counts" in shown
    assert "Kappa is undefined for scores that are all equal" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "none"], "none is not a folder of records: it does not exist"),
        (["a", "plain.jsonl"], "plain.jsonl is not a folder of records: it is a file"),
        (["a", "a", "--on", "udi"], "have no value in the field 'udi'; did you mean 'uid'?"),
        (["a", "a", "--label", "lab"], "neither a nor a has a field 'lab'"),
        (["a", "a", "--label", "word"], "the label 'word' of sample line 0 is 'good', which is not a number"),
        (["a", "text"], "the score of sample line 0 is 'high', which is not a number"),
        (["a", "null", "--on", "word"], "null: 1 records have no value in the field 'word'; did"),
        (["records", "a"], "have no sample in common: the first has uid='q1', the second uid='line 0'"),
        (["empty", "a"], "empty contains no records"),
    ],
)
def test_scorings_that_cannot_be_compared_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    scored(Path("a"), [1.0, 0.0], word=["good", "bad"])
    Path("plain.jsonl").write_text('{"solution_str": "4"}\n')
    scored(Path("text"), ["high"])
    scored(Path("null"), [1.0], word=[None])
    write(Path("records"), sample("q1", score=1.0))
    Path("empty").mkdir()
    assert message in compare(*arguments, code=2)
