"""The example of TRL's GRPO."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import trl_grpo
from reward_loop.records.reader import RecordsReader
from tests.trl_folder import needs_trl, trl_on_path


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    with trl_on_path():
        yield


@needs_trl
@pytest.mark.integration
@pytest.mark.parametrize("option", ["--quick", "--overlapped"])
def test_the_example_trains_and_reports(
    option: str, tmp_path: Path, tiny_generative_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An untrained policy: the real one takes a minute to make.
    (tmp_path / "policy").symlink_to(tiny_generative_model)
    monkeypatch.setattr(trl_grpo, "make_models", lambda cache: SimpleNamespace(directory=tmp_path))
    output = tmp_path / "output"
    assert trl_grpo.main(["--quick", option, "--steps=1", "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    samples = trl_grpo.QUICK.prompts * trl_grpo.QUICK.answers
    assert sum(report["rewards"].values()) == samples
    assert 0 < report["rewards"]["failed"] < samples / 2
    assert len(list(RecordsReader(output / "rewards").rows())) == samples


@pytest.mark.parametrize(("text", "sign"), [("12+30=42<|im_end|>", 1), ("12+30=41<|im_end|>", -1), ("12+30=", -1)])
def test_the_judge_adds_correctly(text: str, sign: int) -> None:
    assert trl_grpo.logit(text) * sign > 0
