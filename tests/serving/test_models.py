from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
    with pytest.raises(ConfigError, match=r"^model_path: there is no directory '/no/such/model'$"):
        model_kind("/no/such/model", "model_path")
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        model_kind(tmp_path, "model_path")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read `architectures` from .*config\.json: JSONDecodeError"):
        model_kind(tmp_path, "model_path")


def test_a_model_in_the_cache_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "models--org--judge" / "snapshots" / "abc", "Qwen2ForSequenceClassification")
    (tmp_path / "models--org--judge" / "refs").mkdir()
    (tmp_path / "models--org--judge" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_kind("org/judge", "model_path") == "discriminative"
    with pytest.raises(ConfigError, match=r"(?s)no directory 'org/other', nor a model of that name.*HF_HUB_OFFLINE"):
        model_kind("org/other", "model_path")


class Hub(http.server.BaseHTTPRequestHandler):
    """Has one model, ``org/judge``."""

    def do_HEAD(self) -> None:
        if not self.path.startswith("/org/judge/resolve/"):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = b'{"architectures": ["Qwen2ForSequenceClassification"]}'
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kind_from_hub(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """What `model_kind` says of a name, in a process that knows of this hub alone."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(name: str) -> str:
            code = (
                "import sys; from reward_loop.errors import ConfigError\n"
                "from reward_loop.serving.models import model_kind\n"
                "try: print(model_kind(sys.argv[1], 'model_path'))\n"
                "except ConfigError as error: print(error)"
            )
            environment = os.environ | {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "HF_HOME": str(tmp_path),
                "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "127.0.0.1",
            }
            command = [sys.executable, "-c", code, name]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        yield ask
        server.shutdown()


def test_a_model_that_is_not_in_the_cache_is_asked_for(kind_from_hub: Callable[[str], str]) -> None:
    assert kind_from_hub("org/judge") == "discriminative\n"
    assert "404" in (answer := kind_from_hub("org/other"))
    assert answer.startswith("model_path: there is no directory 'org/other', nor a model of that name")
