"""The demo's parts: its data, its reward function against a server that is not there, its report."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
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
    LONGEST_ANSWER,
    Course,
    Problem,
    Recipe,
    make_models,
    make_problems,
    make_tokenizer,
    near_misses,
    write_data,
    wrong_answer,
)
from examples.arithmetic.report import _plot_phases, plot, read_report
from reward_loop.testing import FakeJudge

RECORDED = Path(__file__).with_name("metrics.jsonl")
TINY = Recipe(
    hidden_size=16,
    layers=1,
    intermediate_size=16,
    held_out=8,
    development=8,
    learning=Course(steps=3, lr=1e-3, batch_size=8),
    forgetting=Course(steps=2, lr=1e-3, batch_size=8),
)


def test_no_problem_is_in_two_splits_in_either_order() -> None:
    splits = make_problems(Recipe())
    seen = [{frozenset((p.a, p.b)) for p in problems} for problems in splits.values()]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 90 * 91 // 2
    assert len(splits["held_out"]) == Recipe().held_out
    assert len(splits["development"]) == Recipe().development
    assert len(splits["train"]) == len(set(splits["train"]))
    assert make_problems(Recipe()) == splits


@pytest.mark.parametrize(("a", "b", "answer"), [(37, 85, "12"), (50, 50, "00"), (12, 34, "46"), (19, 10, "29")])
def test_the_pupil_forgets_to_carry(a: int, b: int, answer: str) -> None:
    assert Problem(a, b).without_carrying == answer


def test_wrong_answers_are_wrong_short_and_of_many_kinds() -> None:
    rng = random.Random(0)
    problem = Problem(37, 85)
    answers = [wrong_answer(problem, rng) for _ in range(2000)]
    assert problem.answer not in answers
    assert {"12", "112", "121", ""} <= set(answers)
    assert max(map(len, answers)) <= LONGEST_ANSWER
    # Where nothing is to be carried, forgetting it would be right.
    assert "46" not in [wrong_answer(Problem(12, 34), rng) for _ in range(500)]


@pytest.mark.parametrize(("problem", "right"), [(Problem(37, 85), "122"), (Problem(12, 34), "46")])
def test_near_misses_are_wrong_in_one_of_the_last_two_digits(problem: Problem, right: str) -> None:
    rng = random.Random(0)
    drawn = [near_misses(problem, rng) for _ in range(300)]
    digits = "0123456789"
    assert {last for last, _ in drawn} == {right[:-1] + digit for digit in digits} - {right}
    assert {before for _, before in drawn} == {right[:-2] + digit + right[-1] for digit in digits} - {right}


@pytest.mark.integration
def test_verl_reads_the_data(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    train = write_data(TINY, tmp_path)["train"]
    options = OmegaConf.create({"prompt_key": "prompt", "max_prompt_length": 16, "filter_overlong_prompts": True})
    options.cache_dir = str(tmp_path)
    dataset = RLHFDataset([str(tmp_path / "train.parquet")], make_tokenizer(), options)
    assert len(dataset) == len(train)
    row = dataset[0]
    assert row["raw_prompt"] == [{"role": "user", "content": train[0].question}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": train[0].answer}
    assert row["data_source"] == "arithmetic"
    assert row["extra_info"]["question"] == train[0].question


def test_the_chat_is_tokenized_digit_by_digit() -> None:
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "37+85="}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    assert len(ids) == 14
    assert len(tokenizer("\n")["input_ids"]) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n37+85=\nassistant\n"
    assert len(tokenizer("12\ufffd")["input_ids"]) == 5


def test_models_are_made_once_for_a_recipe(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    shares: list[float] = []
    made = make_models(tmp_path, TINY, lambda share, _: shares.append(share))
    again = make_models(tmp_path, TINY)
    other = make_models(tmp_path, replace(TINY, seed=1))
    assert (made.cached, again.cached, other.cached) == (False, True, False)
    assert made.directory == again.directory != other.directory
    assert made.figures == again.figures
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert not list(tmp_path.glob("building-*"))
    AutoModelForCausalLM.from_pretrained(made.policy)
    judge = AutoModelForSequenceClassification.from_pretrained(made.reward_model)
    assert judge.config.num_labels == 1


def test_the_same_recipe_makes_the_same_models(tmp_path: Path) -> None:
    """The threads that train do not make a difference."""
    made = [make_models(tmp_path / name, TINY) for name in ("one", "another")]
    for weights in (Path("policy/model.safetensors"), Path("reward_model/model.safetensors")):
        assert (made[0].directory / weights).read_bytes() == (made[1].directory / weights).read_bytes()


def test_a_step_is_on_the_mean_of_the_parts() -> None:
    torch = pytest.importorskip("torch")
    names = ("model.layers.0.weight", "model.layers.1.weight", "lm_head.weight")
    parameters = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in names}
    with models._Trainer([*parameters.items()], Course(steps=8, lr=0.1)) as trainer:
        loss = trainer.step(lambda factor: sum((factor * p).sum() for p in parameters.values()), [0.05, -0.03])
    assert loss == pytest.approx(3 * 4 * 0.01)
    for parameter in parameters.values():
        torch.testing.assert_close(parameter.grad, torch.full((2, 2), 0.01))
        assert (parameter < 1).all()


def test_an_answer_in_a_row_of_several_is_read_as_if_it_were_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_models(tmp_path, TINY).policy)
    maker = models._Maker(TINY, tmp_path, lambda share, detail: None)
    problems = [Problem(37, 85), Problem(12, 34)]
    together = maker._encode(problems, [("122", "12"), ("46", "1x7")])
    with torch.no_grad():
        read = models._run(model, together)[together.ends]
        alone = []
        for problem, answer in zip([problems[0]] * 2 + [problems[1]] * 2, ["122", "12", "46", "1x7"], strict=True):
            text = f"{models._opening(problem)}{answer}<|im_end|>\n"
            alone.append(model.model(torch.tensor(maker._tokenize([text]))).last_hidden_state[0, -1])
    torch.testing.assert_close(read, torch.stack(alone))
    assert together.right[together.ends].tolist() == [1, 0, 1, 0]
    beginning = together.right[1][together.answer[1] == 2].tolist()
    assert beginning == [0, 0, 0, 0, 0]
    assert together.right[0][together.answer[0] == 2].tolist() == [1, 1, 0, 0]


def test_an_interrupted_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(share: float, detail: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_models(tmp_path, TINY, interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def router() -> Iterator[FakeJudge]:
    """As a router before a reward model: the logit is 2 for the text of a right answer, else -2."""
    with FakeJudge(logit=lambda text: 2.0 if "122<|im_end|>" in text else -2.0) as fake:
        yield fake


async def score(router: FakeJudge, solution: str, **options: Any) -> dict[str, float]:
    arguments: dict[str, Any] = {
        "solution_str": solution,
        "ground_truth": "122",
        "extra_info": {"question": "37+85="},
        "reward_router_address": router.address,
        "reward_model_tokenizer": make_tokenizer(),
    }
    return await reward.compute_score(**arguments | options)


async def test_the_reward_is_the_verdict_and_the_form(router: FakeJudge) -> None:
    likely = 1 / (1 + math.exp(-2))
    right, wrong, malformed = [await score(router, text) for text in ("122", "12", "twelve")]
    assert right == {"score": pytest.approx(0.9 * likely + 0.1), "reward_model": likely, "format": 1, "acc": 1}
    assert wrong["score"] == pytest.approx(0.9 * (1 - likely) + 0.1)
    assert malformed["score"] == pytest.approx(0.9 * (1 - likely))
    assert (wrong["acc"], malformed["acc"], malformed["format"]) == (0, 0, 0)
    text = "<|im_start|>user\n37+85=<|im_end|>\n<|im_start|>assistant\n122<|im_end|>\n"
    assert router.requests[0].body["input"] == text


async def test_a_judge_that_takes_its_time_does_so_in_training_alone(
    router: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(reward, "asyncio", SimpleNamespace(sleep=sleep))
    for split in ("train", "held_out"):
        for _ in range(20):
            await score(router, "122", extra_info={"question": "37+85=", "split": split}, latency_s=4.0)
    await score(router, "122", extra_info={"question": "37+85=", "split": "train"})
    assert len(slept) == 20
    assert 2 <= min(slept) < max(slept) <= 6


@pytest.mark.parametrize("logit", [-1e4, 0.0, 1e4])
def test_no_logit_overflows(logit: float) -> None:
    assert reward._sigmoid(logit) == pytest.approx({-1e4: 0, 0.0: 0.5, 1e4: 1}[logit])


def test_the_report_of_a_recorded_run() -> None:
    report = read_report(RECORDED)
    assert report.accuracy == {0: 0.4531, 6: 0.9609}
    assert (report.before, report.after) == (0.4531, 0.9609)
    assert [step.number for step in report.steps] == [1, 2, 3, 4, 5, 6]
    assert report.outcomes == {"scored": 1536, "unscored": 0, "failed": 0}
    assert report.steps[2].reward == 0.6439
    phases = report.seconds_by_phase
    assert phases["rollout"] == pytest.approx(5.9679)
    assert phases["update"] == pytest.approx(1.7541)
    for step in report.steps:
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
    assert report.seconds_per_step == pytest.approx(9.529)


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    lines = RECORDED.read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:50])
    assert len(read_report(tmp_path / "metrics.jsonl").steps) == 2


def test_nothing_yet(tmp_path: Path) -> None:
    report = read_report(tmp_path / "metrics.jsonl")
    assert (report.before, report.after, report.steps, report.seconds_by_phase) == (None, None, [], {})


def test_conclusion_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_report(RECORDED)
    demo.conclude(demo.Console(width=200), report, tmp_path, {"models": 60.0, "training": 90.0, "total": 150.0})
    shown = capsys.readouterr().out
    assert "45.3% -> 96.1%" in shown
    assert "1,536 scored, 0 unscored, 0 failed" in shown
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["accuracy_before"] == 0.4531
    assert len(written["steps"]) == 6
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_pipeline_logs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever part of it is there; the first step, in which everything warms up, does not count."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for line in lines[1:]:
        first = line["step"] == 1
        others = {name: value for name, value in line["data"].items() if not name.startswith("reward_pipeline/")}
        line["data"] = others | {
            "reward_pipeline/hidden_share": 0.1 if first else 0.75,
            "reward_pipeline/judging_s": 9.0 if first else 4.0,
            "reward_pipeline/waiting_for_rewards_s": 1.0,
        }
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = read_report(metrics)
    assert report.overlap == {"hidden_share": 0.75, "judging_s": 4, "waiting_for_rewards_s": 1}
    assert report.as_dict()["overlap"] == report.overlap
    demo.conclude(demo.Console(width=200), report, tmp_path, {"models": 60.0, "training": 90.0, "total": 150.0})
    shown = re.sub(" +", " ", capsys.readouterr().out)
    steps = len(report.steps)
    assert f"Seconds of judging 4.00 {9 + 4 * (steps - 1):.1f}" in shown
    assert f"waited for 1.00 {steps:.1f}" in shown
    hidden = 8 + 3 * (steps - 1)
    assert f"hidden behind the rest {hidden:.1f} ({hidden / (hidden + steps):.1%})" in shown
    seconds = sum(step.seconds for step in report.steps)
    assert f"All steps without overlap {seconds + hidden:.1f}" in shown
    assert report.as_dict()["total_seconds"]["without_overlap"] == pytest.approx(seconds + hidden)
    wide = (tmp_path / "curves.png").read_bytes()
    metrics.write_text(metrics.read_text().replace("reward_pipeline/", "other/"))
    assert read_report(metrics).overlap == {}
    plot(read_report(metrics), tmp_path / "curves.png")
    assert _width(wide) > _width((tmp_path / "curves.png").read_bytes())


def test_a_phase_of_a_single_step_is_drawn_and_shown_in_the_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step alone waits for rewards: the median of that phase is 0."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    last = lines[-1]["data"]
    last |= {"timing_s/wait_reward": 1.25, "reward_pipeline/waiting_for_rewards_s": 1.25}
    last["timing_s/step"] += 1.25
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = read_report(metrics)
    assert report.seconds_by_phase["waiting for rewards"] == 0
    assert report.total_by_phase["waiting for rewards"] == 1.25
    assert report.totals["hidden_share"] < 1

    bars: dict[str, list[float]] = {}

    class Axes:
        def bar(self, numbers: list[int], heights: list[float], label: str, **_: Any) -> None:
            bars[label] = heights

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: ([], [])

    _plot_phases(Axes(), report)
    for index, step in enumerate(report.steps):
        assert sum(heights[index] for heights in bars.values()) == pytest.approx(step.seconds)
    demo.conclude(demo.Console(width=200), report, tmp_path, {"models": 60.0, "training": 90.0, "total": 150.0})
    assert "waiting for rewards 0.00 1.2" in re.sub(" +", " ", capsys.readouterr().out)


def _width(png: bytes) -> int:
    return int.from_bytes(png[16:20])


def test_the_options_become_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[demo.Settings] = []
    monkeypatch.setattr(demo, "run", lambda console, output, given: settings.append(given) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for options in ([], ["--quick", "--steps", "2"], ["--judge-latency", "0", "--seed", "3", "--development"]):
        assert demo.main([*options, "--output", str(tmp_path)]) == 0
    assert settings == [
        demo.Settings(),
        replace(demo.QUICK, steps=2),
        demo.Settings(judge_latency=0, seed=3, validate_on="development"),
    ]


def test_a_figure_of_a_single_step(tmp_path: Path) -> None:
    one = tmp_path / "metrics.jsonl"
    one.write_bytes(b"".join(RECORDED.read_bytes().splitlines(keepends=True)[:2]))
    plot(read_report(one), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_a_failed_training_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('[no markup]'); print('ConfigError: it is [/wrong]'); raise SystemExit(3)"]
    monkeypatch.setattr(demo, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(demo, "make", lambda display: None)
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


def test_an_earlier_run_is_cleared_and_other_files_are_kept(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "train.log", "mine.txt"):
        (tmp_path / name).touch()
    (tmp_path / "validation").mkdir()
    demo.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    shutil.rmtree(tmp_path)
    demo.clear(tmp_path)
    assert tmp_path.is_dir()


def test_help_and_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--help"])
    assert exit_.value.code == 0
    assert "--quick" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--steps", "0"])
    assert exit_.value.code == 2
