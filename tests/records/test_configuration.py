"""The configuration of a run in its records: its starts, and secrets that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop._util.json import decode
from reward_loop.records import configuration
from reward_loop.records.configuration import (
    MAX_VALUE,
    NOT_RECORDED,
    config_row,
    configurations,
    hide_environment,
    open_configuration,
    public_options,
)
from reward_loop.records.writer import encode_record

FIRST: dict[str, Any] = {"trainer": {"nnodes": 1, "logger": ["console"]}, "reward": {"path": None}, "empty": {}}


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "api-key",
        "hf_token",
        "token",
        "password",
        "db_passwd",
        "client_secret",
        "AWS_ACCESS_KEY_ID",
        "credentials",
        "authorization",
        "judge_key",
        "key",
    ],
)
def test_a_value_with_the_name_of_a_secret_is_not_recorded(name: str) -> None:
    config = {"a": {"kwargs": {name: "Abc-123"}, "list": [{name: "Abc-123"}]}}
    assert public_options(config) == {f"a.kwargs.{name}": NOT_RECORDED, "a.list": [{name: NOT_RECORDED}]}


def test_values_of_environment_variables_and_headers_are_not_recorded() -> None:
    config = {"server": {"env": {"ANY_NAME": "x"}}, "ray": {"env_vars": {"B": 5}}, "headers": {"x-any": "y"}}
    config["credentials"] = {"user": {"name": "u"}, "number": 7}  # everything below the name of a secret, too
    assert set(public_options(config).values()) == {NOT_RECORDED}


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        ("http://user:pass@host:1/v1", f"http://{NOT_RECORDED}@host:1/v1"),
        ("https://host/v1?key=abc#x", "https://host/v1"),
        ("use sk-abcdefghijklmnopqrst now", f"use {NOT_RECORDED} now"),
        ("hf_abcdefghijklmnopqrst", NOT_RECORDED),
    ],
)
def test_secrets_within_other_values_are_not_recorded(value: str, recorded: str) -> None:
    assert public_options({"a": {"url": value}, "b": [value]}) == {"a.url": recorded, "b": [recorded]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_key", "prompt"),
        ("api_key_env", "OPENAI_API_KEY"),
        ("max_tokens", 5),
        ("tokenizer", "/m/Qwen"),
        ("reward_fn_key", "data_source"),
        ("ppo_max_token_len_per_gpu", 16384),
        ("hf_token", None),
        ("logger", ["console"]),
        ("empty", {}),
    ],
)
def test_options_that_are_not_secrets_are_recorded(name: str, value: Any) -> None:
    assert public_options({"data": {name: value}}) == {f"data.{name}": value}


def test_the_value_of_a_secret_environment_variable_is_hidden_in_any_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE_TOKEN", "a-secret-0123456789")
    hide_environment()
    writer = open_configuration(tmp_path)
    writer.write_rows([config_row({"kwargs": {"judge": "a-secret-0123456789"}}, 1)])
    assert writer.flush()
    assert "0123456789" not in writer.path.read_text()
    assert configurations(tmp_path)[0]["options"] == {"kwargs.judge": "[API key]"}


@pytest.mark.parametrize("written", ["a-newline-key\n", "two-lines\r\nof-a\tsecret", 'quo"ted\\key'])
def test_a_secret_is_hidden_as_it_is_sent_and_as_json_writes_it(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_API_KEY", written)
    hide_environment()
    secret = written.strip()
    assert decode(encode_record({"a": f"x {secret} y", "b": json.dumps(secret)})) == {
        "a": "x [API key] y",
        "b": '"[API key]"',
    }


def test_working_directory_and_paths_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", f"{tmp_path}/project")
    monkeypatch.setenv("SECRETS_PATH", str(tmp_path))
    monkeypatch.setenv("SECRETS_TOKEN", str(tmp_path))
    hide_environment()
    writer = open_configuration(tmp_path)
    writer.write_rows([config_row({"trainer": {"default_local_dir": f"{tmp_path}/project/checkpoints"}}, 1)])
    assert writer.flush()
    assert configurations(tmp_path)[0]["options"] == {"trainer.default_local_dir": f"{tmp_path}/project/checkpoints"}


def test_long_values_are_cut_and_the_row_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    options = public_options({"text": "x" * 5000, "list": ["y" * 100] * 100})
    assert [len(value) for value in options.values()] == [MAX_VALUE, MAX_VALUE]
    monkeypatch.setattr(configuration, "MAX_BYTES", 1000)
    row = config_row({f"option{number}": "x" * 80 for number in range(100)}, 1)
    assert 5 < len(row["options"]) < 12
    assert row["omitted"] == 100 - len(row["options"])


@pytest.mark.integration  # imports verl
class TestTrainer:
    """verl's trainer records its configuration once, when training starts."""

    @pytest.fixture
    def trainer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        from tests.verl.configs import resolved
        from tests.verl.trainers import constructed, set_up

        kwargs = "reward.custom_reward_function.reward_kwargs"
        function = "reward.custom_reward_function.path=reward.py"
        options = (f"reward_loop.log_dir={tmp_path}", function, f"+{kwargs}.api_key=Abc-123", f"+{kwargs}.model=qwen")
        made = set_up(monkeypatch, constructed(resolved(*options).with_job("10.0.0.1:1/secret")), step=6)
        made.reward_loop_manager, made.fitted = SimpleNamespace(reward_loop_worker_handles=None), 0
        monkeypatch.setattr(PPOTrainer, "fit", lambda self, workers: setattr(self, "fitted", self.fitted + 1))
        return made

    def fit(self, trainer: Any) -> None:
        trainer.fit(SimpleNamespace(agent_loop_workers=[]))
        assert trainer.fitted == 1

    def test_the_configuration_is_recorded_without_secrets(self, trainer: Any, tmp_path: Path) -> None:
        self.fit(trainer)
        assert open_configuration(tmp_path).flush()
        (found,) = configurations(tmp_path)
        assert (found["step"], found["omitted"]) == (7, 0)
        options, kwargs = found["options"], "reward.custom_reward_function.reward_kwargs"
        assert (options[f"{kwargs}.api_key"], options[f"{kwargs}.model"]) == (NOT_RECORDED, "qwen")
        assert options["algorithm.adv_estimator"] == "gae"
        assert options["data.prompt_key"] == "prompt"
        (path,) = (tmp_path / "config").iterdir()
        assert "secret" not in path.read_text().replace("client_secret", "")
        assert path.stat().st_size < 100_000

    def test_a_configuration_that_cannot_be_recorded_does_not_stop_the_run(
        self, trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("reward_loop.verl.recording_trainer.config_row", lambda *_: 1 / 0)
        self.fit(trainer)
        assert "the configuration is not recorded" in caplog.text
