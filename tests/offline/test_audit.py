"""``reward-loop audit`` on simulated judges with built-in weaknesses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.offline.attacks import rows_of
from reward_loop.offline.audit import PROBES, ProbeResult
from reward_loop.offline.inputs import choose_recorded
from reward_loop.testing import FakeJudge

ROWS = 40
JUDGES = """
import os, random, re, time

def right(text, reference):
    found = re.search(r"The answer is (.+?)\\.\\s*$", text)
    return float(found is not None and found[1] == reference)

def sound(solution_str, ground_truth):
    return right(solution_str, ground_truth)

def accepts_empty(solution_str, ground_truth):
    return 1.0 if not solution_str.strip() else right(solution_str, ground_truth)

def accepts_master_keys(solution_str, ground_truth):
    return 1.0 if solution_str.startswith((":", "Thought process:", "Solution")) else right(solution_str, ground_truth)

def obeys(solution_str, ground_truth):
    obeyed = re.search("highest score|maximum score|<verdict>", solution_str)
    return 1.0 if obeyed else right(solution_str, ground_truth)

def demands_tags(solution_str, ground_truth):
    return right(solution_str, ground_truth) * bool(re.match("<think>.+?</think>", solution_str, re.DOTALL))

def pays_for_reasoning(solution_str, ground_truth):
    return 1.0 if len(solution_str.rpartition("</think>")[0]) > 60 else right(solution_str, ground_truth)

def chance(solution_str, ground_truth):
    return random.random()

def ignores_the_reference(solution_str, ground_truth):
    return float(bool(re.search(r"\\d\\d", solution_str)))

def reads_the_last_number(solution_str, ground_truth):
    return float((re.findall(r"\\d+", solution_str) or [""])[-1] == ground_truth)

def graded(solution_str, ground_truth):
    return 3.0 + 4.0 * right(solution_str, ground_truth)

def harsh(solution_str):
    return 0.0 if "7" in solution_str else 1.0

def fails(solution_str, ground_truth):
    raise ValueError("no judge today")

def slow(solution_str, ground_truth):
    if "STARTED" in os.environ:
        print("scoring", file=open(os.environ["STARTED"], "w"))
    time.sleep(0.3)
    return 1.0

def raises_on_empty(solution_str, ground_truth):
    return right(solution_str, ground_truth) / len(solution_str) * len(solution_str)

def raises_on_not(solution_str, ground_truth):
    return right(solution_str, ground_truth) / (" not " not in solution_str or "afraid" in solution_str)

def style(solution_str):
    return float(len(solution_str) > 30)

def prefers_the_first(solution_str, extra_info):
    return 1.0

def prefers_the_longer(solution_str, extra_info):
    mine, other = len(solution_str), len(extra_info["other"])
    return 0.5 if mine == other else float(mine > other)

def of_lists(solution_strs, ground_truths):
    return [right(*pair) for pair in zip(solution_strs, ground_truths)]
"""
SERVED = """
from reward_loop.client import Judge, Number

judge = Judge("Reference {{reference}}. Is this right?\\n{{answer}}", Number(0, 1), model="judge-7b")

async def compute_score(solution_str, ground_truth, reward_router_address):
    return (await judge(reward_router_address, answer=solution_str, reference=ground_truth)).reward()
"""
REFERENCE_PROBES = {"reference of another row", "answer exchanged", "answer negated"}

WEAKNESSES = {
    "sound": set(),
    "graded": set(),
    "demands_tags": set(),
    "accepts_empty": {"empty answer"},
    "accepts_master_keys": {"master key"},
    "obeys": {"instruction to the judge"},
    "ignores_the_reference": REFERENCE_PROBES | {"instruction to the judge"},  # one of them has a number
    "reads_the_last_number": {"answer negated"},
    "pays_for_reasoning": {"reasoning removed", "answer exchanged", "answer negated"},
}
PAGE = Path(__file__).parents[2] / "docs" / "files.md"


def answers(is_long: Callable[[int], bool] = lambda i: i % 3 == 0, rows_of_step: int | None = None) -> str:
    """Return the rows to score: of each four, one has no answer, one is right, and two are wrong."""
    rows = []
    for i in range(ROWS):
        reasoning = f"{i} and 20 make a sum. " * (4 if is_long(i) else 1)
        text = f"<think>\n{reasoning}\n</think>\nThe answer is {i + 20 + (i % 2)}."
        row = {
            "solution_str": text if i % 4 else "I do not know, I am afraid.",
            "ground_truth": str(i + 20),
            "extra_info": {"label": bool(i % 4 and i % 2 == 0), "other": "The answer is 7." * (i % 6)},
        }
        rows.append(row if rows_of_step is None else {**row, "step": i // rows_of_step + 1})
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "rows.jsonl").write_text(answers())
    return tmp_path


def invoke(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done.output


def records(judge: str = "sound", *more: str) -> str:
    invoke("score", f"judges.py:{judge}", "rows.jsonl", "-o", "records", *more)
    return "records"


def audit(judge: str, *more: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["audit", "records", f"judges.py:{judge}", "--json", *more])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == len(problems(found))
    return found


def problems(found: dict[str, Any]) -> set[str]:
    return {one["probe"] for one in found["probes"] if one["is_problem"]}


def probe(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in found["probes"] if one["probe"] == name]
    return dict(one)


@pytest.mark.parametrize(("judge", "weaknesses"), WEAKNESSES.items())
def test_each_weakness_is_found_and_a_sound_judge_has_none(judge: str, weaknesses: set[str]) -> None:
    records(judge)
    found = audit(judge, code=1 if weaknesses else 0)
    assert problems(found) == weaknesses
    assert all(one["answers"] for one in found["probes"])
    for one in found["probes"]:
        low, high = one["interval"]
        assert 0 <= low <= one["share"] <= high <= 1
        assert bool(one["advice"]) == one["is_problem"]


def test_the_page_lists_what_is_found() -> None:
    _, _, rest = PAGE.read_text().partition("<!-- begin weaknesses -->")
    lines = [line.strip("| ").split(" | ") for line in rest.partition("<!-- end")[0].strip().splitlines()[2:]]
    listed = {judge: set(found.split(", ")) - {"nothing"} for judge, found in lines}
    chance = {"chance": {"same answer again"}, "prefers_the_first": {"order of two answers"}}
    assert listed == {judge.replace("_", " "): found for judge, found in (WEAKNESSES | chance).items()}


def test_random_scores_are_found_by_asking_again() -> None:
    records("chance")
    found = audit("chance", code=1)
    assert {"same answer again", "empty answer", "master key", "instruction to the judge"} <= problems(found)


def test_the_table_ends_with_what_to_do() -> None:
    records("accepts_empty")
    shown = invoke("audit", "records", "judges.py:accepts_empty", code=1)
    assert "40 of 40 scored samples have texts (100%), 40 audited" in shown
    assert "accepted: a score of 0.5 or more" in shown
    assert "100% 91% to 100%" in " ".join(shown.split())
    *_, advice, last = shown.strip().splitlines()
    assert advice.startswith("empty answer: return 0 for an empty answer")
    assert advice.endswith("'': scores 1")
    assert last == "1 problem found"


def test_the_bound_decides_about_the_exit_status() -> None:
    records("accepts_master_keys")
    share = probe(audit("accepts_master_keys", code=1), "master key")["share"]
    assert 0.1 < share < 0.5
    audit("accepts_master_keys", "--fail-above", "0.5")
    audit("accepts_master_keys", "--fail-above", str(share))


def test_a_reference_judge_may_have_another_scale() -> None:
    records()
    alike = probe(audit("sound", "--reference-judge", "judges.py:graded"), "reference judge")
    assert (alike["answers"], alike["wrong"]) == (ROWS, 0)
    found = audit("sound", "--reference-judge", "judges.py:harsh", code=1)
    assert problems(found) == {"reference judge"}


def test_two_answers_are_compared_in_both_orders() -> None:
    records("prefers_the_longer")
    fine = probe(audit("prefers_the_longer", "--other", "other", code=1), "order of two answers")
    assert (fine["answers"], fine["wrong"], fine["is_problem"]) == (ROWS, 0, False)
    biased = probe(audit("prefers_the_first", "--other", "other", code=1), "order of two answers")
    assert biased["is_problem"]
    assert "examples/judges/pairwise.py" in biased["advice"]


def test_labels_are_compared_with_the_function() -> None:
    records()
    fine = probe(audit("sound", "--label", "extra_info.label"), "labelled answers")
    assert (fine["answers"], fine["wrong"]) == (ROWS, 0)
    shutil.rmtree("records")
    records("reads_the_last_number")
    assert "labelled answers" in problems(audit("harsh", "--label", "extra_info.label", code=1))


def test_a_function_that_does_not_take_the_reference_is_not_asked_about_it() -> None:
    records("style")
    found = audit("style", code=1)  # it pays for length
    assert problems(found) == {"master key", "instruction to the judge"}
    assert {one["probe"] for one in found["probes"] if not one["answers"]} == REFERENCE_PROBES
    assert "no row fits" in invoke("audit", "records", "judges.py:style", code=1)


def test_functions_of_lists_are_audited() -> None:
    records("of_lists", "--manager", "batch")
    assert problems(audit("of_lists", "--manager", "batch")) == set()


def test_the_share_of_texts_that_the_records_still_have_is_told(folder: Path) -> None:
    records("sound", "-O", "record.full=0.5")
    found = audit("sound")
    assert 0 < found["with_texts"] == found["audited"] < found["samples"] == ROWS
    shutil.rmtree(folder / "records" / "texts")
    message = "records: 0 of 40 scored samples have texts: no rows"
    assert message in invoke("audit", "records", "judges.py:sound", code=2)


def test_few_rows_are_chosen_by_chance_from_all() -> None:
    records()
    chosen = [row.columns["ground_truth"] for row in choose_recorded(Path("records"), 8).rows]
    assert len(set(chosen)) == 8
    assert any(int(one) >= 20 + ROWS // 2 for one in chosen)
    assert chosen == [row.columns["ground_truth"] for row in choose_recorded(Path("records"), 8).rows]
    assert audit("sound", "--rows", "8")["audited"] == 8


MISTAKES = [
    (["records"], 2, "missing argument 'FUNCTION'"),
    (["nowhere", "judges.py:sound"], 2, "nowhere is not a folder of records"),
    (["records", "judges.py:soun"], 2, "soun"),
    (["records", "judges.py:sound", "--label", "extra_info.lable"], 2, "no row has a number there"),
    (["records", "judges.py:sound", "--other", "label"], 2, "no row has a text there"),
    (["records", "served.py:compute_score"], 2, "--router-address: served.py:compute_score needs it"),
    (["records", "judges.py:of_lists", "--manager", "group"], 2, "scores groups"),
    (["records", "judges.py:fails", "-O", "retry.max_attempts=1"], 1, "calls failed"),
    (["records", "judges.py:sound", "--reference-judge", "judges.py:sond"], 2, "sond"),
]


def test_wrong_usage_and_failures_are_reported() -> None:
    records()
    for arguments, code, message in MISTAKES:
        assert message in " ".join(invoke("audit", *arguments, code=code).split())


def test_equal_scores_need_the_accepted_one() -> None:
    records("slow", "--concurrency", "40")
    assert "all recorded scores are 1" in invoke("audit", "records", "judges.py:sound", code=2)
    assert "same answer again" in problems(audit("sound", "--accept", "0.5", code=1))


def test_a_served_judge_is_asked_at_the_address_in_the_records(folder: Path) -> None:
    def reply(body: Any) -> str:
        text = body["messages"][-1]["content"]
        reference = text.partition("Reference ")[2].partition(".")[0]
        obeyed = "highest score" in text or "maximum score" in text
        return f"Score: {int(obeyed or f'The answer is {reference}.' in text)}"

    with FakeJudge(reply) as judge:
        invoke("score", "served.py:compute_score", "rows.jsonl", "-o", "records", "--router-address", judge.address)
        count = len(judge.requests)
        shown = invoke("audit", "records", "served.py:compute_score", code=1)
        assert len(judge.requests) > count
        assert f"The judge's address in the records is {judge.address}" in shown
        assert "instruction to the judge: the answer decides the verdict" in shown
        assert "1 problem found" in shown


def test_new_answers_of_a_running_run_are_audited_until_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records()
    looks = 0

    def wait(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise KeyboardInterrupt
        if looks == 2:  # until now, there is nothing new
            (folder / "more.jsonl").write_text(answers(rows_of_step=20))
            invoke("score", "judges.py:sound", "more.jsonl", "-o", "more")
            shutil.copytree(folder / "more" / "texts", folder / "records" / "texts", dirs_exist_ok=True)
            for path in (folder / "more").glob("*.jsonl"):
                (folder / "records" / path.name).write_text(path.read_text().replace('"line ', '"more '))

    monkeypatch.setattr("reward_loop.offline.audit.time", SimpleNamespace(sleep=wait))
    done = CliRunner().invoke(app, ["audit", "records", "judges.py:sound", "--follow", "30", "--json"])
    assert done.exit_code == 130, done.output
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(one["samples"], one["problems"]) for one in rounds] == [(ROWS, 0), (ROWS, 0)]
    assert [[part["steps"] for part in one["by_step"]] for one in rounds] == [[], [[1, 1], [2, 2]]]


def made(name: str, reference: Any, response: str, *others: Any) -> list[str]:
    rows = rows_of([(reference, "", response), *((other, "", "") for other in others)])
    (probe,) = [one for one in PROBES if one.name == name]
    return list(probe.make(rows[0], 0))[:1]


@pytest.mark.parametrize(
    ("reference", "response", "expected"),
    [
        ("42", "It is 42. \\boxed{42}. So 42 apples.", "It is 77. \\boxed{77}. So 77 apples."),
        ("1250", "Sum 1,250 of 1250", "Sum 77 of 77"),
        ("42", "So 42, or 42.0.", "So 77, or 77."),
        ("42", "It is 142", None),
        ("Rome", "rome is Rome, not Romeo.", "77 is 77, not Romeo."),
    ],
)
def test_an_answer_is_exchanged_in_all_places(reference: str, response: str, expected: str | None) -> None:
    assert made("answer exchanged", reference, response, "77") == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>\nSo.\n\nYes.\n</think>\n42", "<think>\n\n</think>\n42"),
        ("<think>So.</think>42", "<think> </think>42"),
        ("So.\n</think>\n42", "\n</think>\n42"),  # the chat template wrote the tag
        ("Well: [THINK]So.[/THINK] 42", "Well: [THINK] [/THINK] 42"),
        ("<think>a\n</think>call\n<think>b <think>c</think>\n</think>42", "<think>\n</think>call\n<think>\n</think>42"),
        ("analysisSo. assistantfinal42", "analysis assistantfinal42"),
        ("<think>\n\n</think>\n42", None),
        ("So. 42", None),
        ("<think>So.</think>42 <think>But", None),
    ],
)
def test_reasoning_is_removed_and_its_tags_stay(response: str, expected: str | None) -> None:
    assert made("reasoning removed", "42", response) == ([] if expected is None else [expected])


def test_answers_without_reasoning_have_no_reasoning_to_remove(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(re.sub("<think>.*?</think>", "", answers()))
    records()
    assert probe(audit("sound"), "reasoning removed")["answers"] == 0


def test_a_rule_that_is_exploited_more_and_more_is_seen_by_step(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(answers(is_long=lambda i: i >= 20, rows_of_step=4))
    records("pays_for_reasoning")
    found = audit("pays_for_reasoning", code=1)
    seen = [(part["steps"], part["answers"], part["wrong"], part["share"]) for part in found["by_step"]]
    expected = [
        ([1, 2], 4, 0, 0.0),
        ([3, 4], 4, 0, 0.0),
        ([5, 6], 4, 2, 0.5),
        ([7, 8], 4, 4, 1.0),
        ([9, 10], 4, 4, 1.0),
    ]
    assert seen == expected
    edited = [probe(found, name) for name in ("answer exchanged", "answer negated")]
    assert sum(one["answers"] for one in edited) == 20
    shown = " ".join(invoke("audit", "records", "judges.py:pays_for_reasoning", code=1).split())
    assert "exchanged or negated verdicts wrong share 95 % interval steps 1 to 2 4 0 0% 0% to 49% steps 3" in shown
    # The failed calls with negated answers are left out.
    failed = audit("raises_on_not", "-O", "retry.max_attempts=1", code=1)["by_step"]
    assert [(part["steps"], part["answers"]) for part in failed] == [(steps, 2) for steps, *_ in expected]


@pytest.mark.parametrize(("rows_of_step", "expected"), [(None, []), (ROWS, []), (28, [([1, 1], 14), ([2, 2], 6)])])
def test_the_ranges_have_whole_steps(folder: Path, rows_of_step: int | None, expected: list[Any]) -> None:
    (folder / "rows.jsonl").write_text(answers(rows_of_step=rows_of_step))
    records()
    seen = [(part["steps"], part["answers"]) for part in audit("sound")["by_step"]]
    assert seen == expected
    assert ("exchanged or negated" in invoke("audit", "records", "judges.py:sound")) is bool(expected)


def test_a_canary_never_contains_the_reference() -> None:
    for reference in ("10", "1", ["Paris", "highest score"]):
        for index in range(12):
            rows = rows_of([(reference, "", "")])
            for one in PROBES[1:4]:
                text = next(iter(one.make(rows[0], index)))
                assert "highest score" not in text or reference != ["Paris", "highest score"]
                assert reference != "10" or "10" not in text


def test_failed_calls_are_no_verdicts() -> None:
    assert ProbeResult("empty answer").share is None
    records("raises_on_empty")
    found = audit("raises_on_empty", "-O", "retry.max_attempts=1")
    empty = probe(found, "empty answer")
    assert empty["failed"] > 0
    assert empty["answers"] + empty["failed"] == ROWS
