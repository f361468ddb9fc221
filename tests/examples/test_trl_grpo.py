"""The example of TRL's GRPO."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import trl_grpo
from reward_loop.records.reader import RecordsReader
from tests.support.trl_folder import needs_trl, trl_on_path


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    with trl_on_path():
        yield


@pytest.fixture
def output(tmp_path: Path, tiny_generative_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose policy is not trained: the real one takes a minute to make."""
    (tmp_path / "policy").symlink_to(tiny_generative_model)
    monkeypatch.setattr(trl_grpo, "make_models", lambda cache, report: SimpleNamespace(directory=tmp_path))
    return tmp_path / "output"


@needs_trl
@pytest.mark.integration
@pytest.mark.parametrize("option", ["--quick", "--overlapped"])
def test_the_example_trains_and_reports(option: str, output: Path) -> None:
    assert trl_grpo.main(["--quick", option, "--steps=1", "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    samples = trl_grpo.QUICK.prompts * trl_grpo.QUICK.answers
    assert sum(report["rewards"].values()) == samples
    assert 0 < report["rewards"]["failed"] < samples / 2
    assert report["masked"] == report["rewards"]["failed"]
    assert report["masked_with_advantage"] == 0
    assert len(list(RecordsReader(output / "rewards").rows())) == samples


@needs_trl
@pytest.mark.integration
def test_the_plain_run_masks_no_sample_and_writes_no_records(output: Path) -> None:
    assert trl_grpo.main(["--quick", "--plain", "--steps=1", "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    assert (report["rewards"], report["masked"]) == ({}, 0)
    assert not (output / "rewards").exists()


@pytest.mark.parametrize("answer", ["42", "41", "x", "042"])
async def test_the_plain_function_returns_the_scores_of_the_judge(answer: str) -> None:
    question = [{"role": "user", "content": "12+30="}]
    plain = trl_grpo.plain_reward([question], [[{"role": "assistant", "content": answer}]])
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, tokenize: "".join(one["content"] for one in messages) + "<|im_end|>"
    )
    with trl_grpo.judge(replace(trl_grpo.QUICK, failing=0.0)) as server:
        found = await trl_grpo.compute_score(answer, "42", {"question": "12+30="}, server.address, tokenizer)
    assert plain == [found["score"]]


@pytest.mark.parametrize(("text", "sign"), [("12+30=42<|im_end|>", 1), ("12+30=41<|im_end|>", -1), ("12+30=", -1)])
def test_the_judge_adds_correctly(text: str, sign: int) -> None:
    assert trl_grpo.logit(text) * sign > 0
