"""The parts of the demo: models, reward function, report and command."""

from __future__ import annotations

import functools
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.arithmetic import demo, models, reward
from examples.arithmetic.models import (
    CHAT_TEMPLATE,
    NEAR_MISSES,
    QUESTION_TOKENS,
    Problem,
    Recipe,
    WeakRewardModelError,
    answers_by_kind,
    make_models,
    make_problems,
    wrong_answer,
)
from examples.arithmetic.report import Report, read_report
from examples.tiny_models import IM_END, tiny_tokenizer
from examples.training import write_dataset
from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardSample
from reward_loop.records.trainer_events import HealthRecords
from reward_loop.testing import FakeJudge

RECORDED = Path(__file__).with_name("metrics.jsonl")
TINY = Recipe(hidden_size=16, layers=1, held_out=8, batch_size=8, steps=5, bound=0.0, forgetting_steps=2)


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = CHAT_TEMPLATE
    return made


def test_no_held_out_problem_is_trained_on_in_either_order() -> None:
    train, held_out = make_problems(Recipe())
    seen = [{frozenset((p.a, p.b)) for p in problems} for problems in (train, held_out)]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 90 * 91 // 2
    assert len(held_out) == Recipe().held_out
    assert len(train) == len(set(train))
    assert make_problems(Recipe()) == (train, held_out)


def test_wrong_answers_are_wrong_and_of_many_kinds() -> None:
    rng = random.Random(0)
    problem = Problem(37, 85)
    answers = [wrong_answer(problem, rng) for _ in range(2000)]
    assert problem.answer not in answers
    assert {"12", "112", "121", ""} <= set(answers)
    # Without a carry, the answer without carrying is right.
    assert "46" not in [wrong_answer(Problem(12, 34), rng) for _ in range(500)]


@pytest.mark.processes
def test_the_holes_of_a_rule_are_named_before_the_run_that_learns_them(tmp_path: Path) -> None:
    pairs = [(f"{a}+{a + 9}=", str(2 * a + 9)) for a in range(40, 52)]
    write_dataset(tmp_path / "held_out.parquet", "arithmetic", "held_out", pairs)
    made: Any = SimpleNamespace(directory=tmp_path)
    paid, *_ = demo.attacked(made, "substring")
    assert paid.startswith("false positives: wrong answers that need no reference are right")
    assert "shotgun" in paid
    options = demo.training_options(made, tmp_path, demo.Settings(rule="substring", response_length=12))
    assert {"custom_reward_function.name=substring", "data.max_response_length=12"} < set(options)
    assert not [option for option in options if "reward_model" in option and "reward_loop" not in option]


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("off by 1", {"121", "123"}),
        ("off by 2", {"120", "124"}),
        ("off by 10", {"112", "132"}),
        ("carry forgotten", {"12", "22"}),
        ("carry invented", {"132", "222"}),
        ("digits swapped", {"212", "122"}),
        ("question repeated", {"37+85", "37+", "37", "85"}),
    ],
)
def test_near_misses(kind: str, answers: set[str]) -> None:
    rng = random.Random(0)
    assert {NEAR_MISSES[kind](Problem(37, 85), rng) for _ in range(100)} == answers


def test_the_reward_model_is_tested_on_wrong_answers_of_each_kind() -> None:
    problem = Problem(37, 85)
    found = answers_by_kind([problem] * 100, random.Random(0))
    assert found.pop("right") == [(problem, "122")] * 100
    assert found.keys() == NEAR_MISSES.keys()
    assert all(texts and "122" not in {text for _, text in texts} for texts in found.values())


@pytest.mark.processes
def test_a_reward_model_that_accepts_wrong_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeakRewardModelError, match=r"After 6 steps, .* of the kind '.*', less than 97%: .* --seed"):
        make_models(tmp_path, replace(TINY, bound=0.97, rounds=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_the_chat_template_puts_the_answer_directly_after_the_question() -> None:
    question = {"role": "user", "content": "37+85="}
    ids = tokenizer().apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    assert len(ids) == QUESTION_TOKENS
    whole = tokenizer().apply_chat_template([question, {"role": "assistant", "content": "122"}], tokenize=False)
    assert whole == "37+85=122<|im_end|>"


@pytest.mark.integration
def test_models_are_made_once_for_a_recipe(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    reported: list[str] = []
    made = make_models(tmp_path, TINY, reported.append)
    again = make_models(tmp_path, TINY)
    other = make_models(tmp_path, replace(TINY, seed=1))
    assert (made.cached, again.cached, other.cached) == (False, True, False)
    assert made.directory == again.directory != other.directory
    assert made.figures == again.figures
    assert [text.split(",")[0] for text in reported] == [
        *(f"step {i} of the reward model" for i in range(1, 6)),
        *(f"step {i} of the policy" for i in (1, 2)),
    ]
    assert made.figures["reward_model_steps"] == 5
    assert made.figures["reward_model_accuracy"].keys() == {"right", *NEAR_MISSES}
    assert not list(tmp_path.glob("building-*"))
    policy = AutoModelForCausalLM.from_pretrained(made.directory / "policy")
    judge = AutoModelForSequenceClassification.from_pretrained(made.directory / "reward_model")
    assert judge.config.num_labels == 1
    assert judge.model.norm.weight.tolist() != policy.model.norm.weight.tolist()  # trained further


@pytest.mark.integration
def test_an_answer_is_right_up_to_its_first_wrong_token() -> None:
    problem = Problem(37, 85)
    answers = models._Answers(tokenizer(), [(problem, text) for text in ("122", "12", "132", "")])
    right = [row[mask].tolist() for row, mask in zip(answers.right, answers.mask, strict=True)]
    assert right == [[1, 1, 1, 1], [1, 1, 0], [1, 0, 0, 0], [0]]
    assert answers.tokens[range(4), answers.ends].unique().tolist() == [tokenizer().eos_token_id]


@pytest.fixture
def router() -> Iterator[FakeJudge]:
    """Return a fake reward model: the logit is 2 for the text of a right answer, else -2."""
    with FakeJudge(logit=lambda text: 2.0 if "122<|im_end|>" in text else -2.0) as fake:
        yield fake


class PlainTokenizer:
    """The chat template alone, without the import of transformers."""

    def apply_chat_template(self, conversation: list[dict[str, str]], tokenize: bool) -> str:
        return "".join(message["content"] for message in conversation) + IM_END


async def score(router: FakeJudge, solution: str, **options: Any) -> dict[str, float]:
    arguments: dict[str, Any] = {
        "solution_str": solution,
        "ground_truth": "122",
        "extra_info": {"question": "37+85="},
        "reward_router_address": router.address,
        "reward_model_tokenizer": PlainTokenizer(),
    }
    return await reward.compute_score(**arguments | options)


async def test_the_reward_combines_verdict_and_format(router: FakeJudge) -> None:
    likely = 1 / (1 + math.exp(-2))
    right, wrong, malformed = [await score(router, text) for text in ("122", "12", "twelve")]
    assert right == {"score": pytest.approx(0.9 * likely + 0.1), "reward_model": likely, "format": 1, "acc": 1}
    assert wrong["score"] == pytest.approx(0.9 * (1 - likely) + 0.1)
    assert malformed["score"] == pytest.approx(0.9 * (1 - likely))
    assert (wrong["acc"], malformed["acc"], malformed["format"]) == (0, 0, 0)
    assert router.requests[0].body["input"] == "37+85=122<|im_end|>"


async def test_spot_checks_ask_a_strong_reward_model_about_a_share_of_the_answers(router: FakeJudge) -> None:
    extra = {"question": "37+85="}
    samples = [RewardSample("12", ground_truth="122", extra_info=extra, uid=f"{i}") for i in range(24)]
    kwargs = {"spot": 0.5, "reward_model_tokenizer": PlainTokenizer()}
    manager = NaiveRewardLoopManager(
        compute_score=functools.partial(reward.compute_score, **kwargs), reward_router_address=router.address
    )
    async with RewardAgent(manager) as agent:
        found = [result["reward_extra_info"] for result in await agent.submit(samples)]
    assert {made["judged_by"] for made in found} == {"cheap", "strong"}
    models = [request.body["model"] for request in router.requests]
    assert models.count("cheap") == 24
    assert models.count("strong") == sum(made["judged_by"] == "strong" for made in found)
    same = 0.9 / (1 + math.exp(2)) + 0.1
    assert [made["score"] for made in found] == [pytest.approx(same)] * 24  # both judges agree


def test_the_report_of_a_recorded_run() -> None:
    report = read_report(RECORDED)
    assert report.accuracy == {0: 0.4531, 6: 0.9609}
    assert [step.number for step in report.steps] == [1, 2, 3, 4, 5, 6]
    assert report.outcomes == {"scored": 1536, "unscored": 0, "failed": 0}
    assert report.steps[2].reward == 0.6439
    for step in report.steps:
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
    found = report.as_dict()
    assert found["seconds_by_phase"]["rollout"] == pytest.approx(5.9679)
    assert found["seconds_by_phase"]["update"] == pytest.approx(1.7541)
    assert found["seconds_per_step"] == pytest.approx(9.529)
    assert found["overlap"]["judging_s"] == pytest.approx(6.4355)


@pytest.fixture
def judged(tmp_path: Path) -> Report:
    """Return the report of the recorded run, with seconds of judging."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for line in lines[1:]:
        line["data"] |= {"timing_s/wait_reward": 1.0, "timing_s/step": line["data"]["timing_s/step"] + 1.0}
        judging = 9.0 if line["step"] == 1 else 4.0
        line["data"] |= {"reward_pipeline/judging_s": judging}
        line["data"] |= {"reward_pipeline/waiting_for_rewards_s": 1.0}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_report(metrics)


def test_the_conclusion_fits_a_screen_and_the_table_and_the_figure_are_written(
    judged: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.conclude(demo.Console(width=80), judged, tmp_path, {"models": 60.0, "training": 90.0, "total": 150.0})
    shown = capsys.readouterr().out
    seconds = sum(step.seconds for step in judged.steps)
    for sentence in (
        "Exact match on held-out problems rose from 45% to 96%.",
        "The mean reward rose from 0.45 to 0.73 in 6 steps.",
        "Judging took 4.0 s a step, 79.3% of it hidden behind generation and training.",
        f"All steps took {seconds:.0f} s. Without this overlap, waiting for rewards would have added 23 s.",
        "1,536 answers were scored; none failed.",
        "The live numbers of the run gave no warning.",
        "Seconds in all: 150, of them 60 for the models.",
    ):
        assert f"{sentence}\n" in shown
    assert f"reward-loop report {tmp_path / demo.RECORDS}\n" in shown
    assert f"reward-loop view {tmp_path / demo.RECORDS} --open\n" in shown
    assert shown.count("\n") < 24
    table = re.sub(" +", " ", (tmp_path / "report.txt").read_text())
    for row in (
        "Rewards 1,536 scored, 0 unscored, 0 failed",
        f"Seconds a step (median), all steps 10.53 {seconds:.1f}",
        "waiting for rewards 1.00 6.0",
        "Seconds of judging 4.00 29.0",
        "hidden behind the rest 3.00 23.0",
        "Hidden share of judging 79.3%",
    ):
        assert row in table
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["accuracy_before"] == 0.4531
    assert written["total_seconds_without_overlap"] == pytest.approx(seconds + 23)
    assert len(written["steps"]) == 6
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_conclusion_names_the_first_warning_and_the_reward_at_that_time(judged: Report, tmp_path: Path) -> None:
    health = HealthRecords(tmp_path)
    for step, message in ((3, "the judge accepted 9 of 10 answers. Read them. "), (5, "another one")):
        health.write_warnings([{"step": step, "monitor": "canaries", "message": message}])
    health.flush()
    (sentence,) = demo.warned(judged, tmp_path)
    assert "(of 2), in step 3, at a mean reward of 0.64:" in sentence
    assert sentence.endswith("canaries: the judge accepted 9 of 10 answers.")


def test_the_options_become_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[demo.Settings] = []
    monkeypatch.setattr(demo, "run", lambda console, output, given: settings.append(given) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for options in (
        [],
        ["--quick", "--steps", "2"],
        ["--judge-latency", "0", "--seed", "3", "--engine", "vllm"],
        ["--weak-judge", "--spot", "0.2"],
    ):
        assert demo.main([*options, "--output", str(tmp_path)]) == 0
    assert settings == [
        demo.Settings(),
        replace(demo.QUICK, steps=2),
        demo.Settings(judge_latency=0, seed=3, engine="vllm"),
        demo.Settings(weak_judge=True, spot=0.2, answers=16),
    ]


def test_a_failed_training_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('[no markup]'); print('ConfigError: it is [/wrong]'); raise SystemExit(3)"]
    monkeypatch.setattr(demo, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(demo, "make", lambda console, recipe: None)
    monkeypatch.setattr(demo, "training_command", lambda *_: command)
    assert demo.run(demo.Console(width=200), tmp_path / "out", demo.QUICK) == 1
    shown = capsys.readouterr().out
    assert "ConfigError: it is [/wrong]" in shown
    assert "status 3" in shown
    assert str(tmp_path / "out" / "train.log") in shown


@pytest.mark.integration
def test_interrupted_by_a_signal(tmp_path: Path) -> None:
    """SIGTERM during the making of the models ends the demo, without a traceback."""
    program = (
        "import sys; from pathlib import Path; from examples.arithmetic import demo;"
        f"demo.CACHE = Path({str(tmp_path / 'cache')!r});"
        f"sys.exit(demo.main(['--quick', '--output', {str(tmp_path / 'out')!r}]))"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + 400
        while not list(tmp_path.glob("cache/building-*/held_out.parquet")) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Traceback" not in output
    assert list((tmp_path / "cache").iterdir()) == []


def test_help_and_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--help"])
    assert exit_.value.code == 0
    assert "--quick" in capsys.readouterr().out
    for wrong in (
        ["--steps", "0"],
        ["--spot", "0.2"],
        ["--weak-judge", "--spot", "1.1"],
        ["--rule", "substring", "--weak-judge"],
    ):
        with pytest.raises(SystemExit) as exit_:
            demo.main(wrong)
        assert exit_.value.code == 2
