from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from reward_loop.errors import ConfigError
from reward_loop.serving.models import model_kind

constants = pytest.importorskip("huggingface_hub.constants")


def write_config(directory: Path, *architectures: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": architectures}))
    return directory


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Qwen2ForCausalLM", "generative"),
        ("Qwen2ForSequenceClassification", "discriminative"),
        ("InternLM2ForRewardModel", "discriminative"),
        ("Qwen2ForProcessRewardModel", "discriminative"),
    ],
)
def test_the_architecture_determines_the_kind(architecture: str, kind: str, tmp_path: Path) -> None:
    assert model_kind(write_config(tmp_path, architecture), "model_path") == kind


def test_a_model_that_classifies_tokens_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen2ForTokenClassification")
    with pytest.raises(ConfigError, match=r"^model_path: Qwen2ForTokenClassification .*engine='external' .*/pooling$"):
        model_kind(tmp_path, "model_path")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model_path: the directory '/no/such/model' does not exist$"):
        model_kind("/no/such/model", "model_path")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_kind(tmp_path, "model_path")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read `architectures` from .*config\.json: JSONDecodeError"):
        model_kind(tmp_path, "model_path")


def test_a_model_in_the_cache_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "models--org--judge" / "snapshots" / "abc", "Qwen2ForSequenceClassification")
    (tmp_path / "models--org--judge" / "refs").mkdir()
    (tmp_path / "models--org--judge" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_kind("org/judge", "model_path") == "discriminative"


def test_a_model_that_is_not_in_the_cache_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "downloaded", "Qwen2ForSequenceClassification")

    def download(name: str, file: str) -> str:
        if name != "org/judge":
            raise OSError("404 Client Error")
        return str(tmp_path / "downloaded" / file)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert model_kind("org/judge", "model_path") == "discriminative"
    with pytest.raises(ConfigError, match=r"^model_path: 'org/other' is neither a directory nor a model .* 404"):
        model_kind("org/other", "model_path")


def test_a_mistyped_path_is_named_where_the_hub_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"^model_path: the directory 'org/judge' does not exist; for a model of the"):
        model_kind("org/judge", "model_path")
