"""`LabelledAnswers` reads the file of labelled answers, and says when they are due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_loop.audit.probes import LabelledAnswers
from reward_loop.errors import ConfigError


def written(folder: Path, *lines: Any) -> str:
    path = folder / "labelled.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def numbered(folder: Path, count: int) -> str:
    return written(folder, *({"solution_str": str(number), "label": True} for number in range(count)))


def test_a_line_has_the_fields_of_a_sample_and_a_label(tmp_path: Path) -> None:
    line = {"solution_str": "4", "label": 1, "ground_truth": "4", "extra_info": {"a": 1}, "prompt": "2+2?", "uid": "u"}
    answers = LabelledAnswers(written(tmp_path, line, "", {"solution_str": "5", "label": False}), 10)
    found = {sample.uid: (sample, label) for sample, label in answers.due(1, (0, 1))}
    sample, label = found["u"]
    assert (sample.solution_str, sample.ground_truth, sample.extra_info, sample.prompt) == ("4", "4", {"a": 1}, "2+2?")
    assert label
    assert sample.is_probe
    assert found["labelled 3"][1] is False


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: it is not JSON"),
        ([{"label": True}], "line 1.solution_str: required"),
        ([{"solution_str": "a", "label": "perhaps"}], "line 1.label"),
        ([{"solution_str": "a", "label": True, "answer": "b"}], "unknown option"),
        ([], "no answers"),
        ([{"solution_str": "a", "label": True, "uid": "x"}] * 2, "'x' occurs more than once"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LabelledAnswers(written(tmp_path, *lines), 10)


def test_a_file_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    path = Path(numbered(tmp_path, 2))
    path.write_text("\ufeff" + path.read_text())
    assert len(LabelledAnswers(str(path), 10).answers) == 2


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward_loop\.audit\.labelled=.*missing\.jsonl"):
        LabelledAnswers(str(tmp_path / "missing.jsonl"), 10)


def test_answers_are_due_every_some_steps_each_time_in_another_order(tmp_path: Path) -> None:
    answers = LabelledAnswers(numbered(tmp_path, 20), 10)
    found = {step: [sample.uid for sample, _ in answers.due(step, (0, 1))] for step in (3, 4, 12, 13, 22, 30)}
    assert [step for step, uids in found.items() if uids] == [3, 13, 30]
    assert sorted(map(str, found[3])) == sorted(map(str, found[13])) == sorted(map(str, found[30]))
    assert found[3] != found[13] != found[30]


def test_without_steps_answers_are_due_once(tmp_path: Path) -> None:
    answers = LabelledAnswers(numbered(tmp_path, 2), 1)
    assert [len(answers.due(None, (0, 1))) for _ in range(3)] == [2, 0, 0]


def test_processes_share_the_answers(tmp_path: Path) -> None:
    path = numbered(tmp_path, 7)
    parts = [LabelledAnswers(path, 10).due(1, (position, 3)) for position in range(3)]
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert len({sample.uid for part in parts for sample, _ in part}) == 7


def test_the_drift_is_the_distance_to_the_first_score(tmp_path: Path) -> None:
    answers = LabelledAnswers(numbered(tmp_path, 1), 10)
    assert [answers.drift("a", score) for score in (0.5, 0.25, 0.75)] == [None, 0.25, 0.25]
