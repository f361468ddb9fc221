"""A training process, its data file and its metrics."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from examples.training import TrainingProcess, read_metrics, write_dataset


@pytest.mark.integration
def test_verl_reads_the_data(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from examples.tiny_models import tiny_tokenizer

    file = tmp_path / "train.parquet"
    write_dataset(file, "sums", "train", [("1+2=", "3"), ("3+4=", "7")])
    options = OmegaConf.create({"prompt_key": "prompt", "max_prompt_length": 64, "filter_overlong_prompts": True})
    options.cache_dir = str(tmp_path)
    dataset = RLHFDataset([str(file)], tiny_tokenizer(), options)
    assert len(dataset) == 2
    row = dataset[1]
    assert row["raw_prompt"] == [{"role": "user", "content": "3+4="}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "7"}
    assert row["data_source"] == "sums"
    assert row["extra_info"] == {"index": 1, "split": "train", "question": "3+4="}


def test_a_model_and_data_to_try_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from examples import tiny_models

    built: list[tuple[Path, str]] = []
    monkeypatch.setattr(tiny_models, "build_tiny_model", lambda *of: built.append(of))
    monkeypatch.setattr(sys, "argv", ["tiny_models", str(tmp_path / "model"), "--data", str(tmp_path / "data")])
    tiny_models.main()
    assert built == [(tmp_path / "model", "generative")]
    train, val = (parquet.read_table(tmp_path / "data" / f"{split}.parquet").to_pylist() for split in ("train", "val"))
    assert (len(train), len(val)) == (64, 8)
    assert train[1]["prompt"] == [{"role": "user", "content": "1 + 1 ="}]
    assert train[1]["reward_model"]["ground_truth"] == "2"
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in val}


def test_an_incomplete_line_of_the_metrics_is_omitted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(file) == []
    lines = [json.dumps({"step": step, "data": {"loss": step / 2}}) for step in (1, 2)]
    file.write_text(lines[0] + "\n" + lines[1][:10])
    assert read_metrics(file) == [(1, {"loss": 0.5})]
    file.write_text("\n".join(lines) + "\n")
    assert read_metrics(file) == [(1, {"loss": 0.5}), (2, {"loss": 1.0})]


CHILDREN = """
import subprocess, sys, time
# Like Ray, each child has its own process group. The second one also ignores SIGINT.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], process_group=0)
time.sleep(600)
"""


def _session_members(session: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def test_stopping_the_training_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with TrainingProcess([sys.executable, "-c", CHILDREN], log, tmp_path / "metrics.jsonl") as training:
        deadline = time.monotonic() + 120
        while "up" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        session = training.session
        assert len(_session_members(session)) == 3
    deadline = time.monotonic() + 60
    while _session_members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _session_members(session) == []
