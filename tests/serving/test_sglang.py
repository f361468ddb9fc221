"""SGLang behind the manager and the router, with a stub that starts fast. `test_real_sglang.py` runs the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import Sglang
from tests.servers import Watched, post

pytestmark = pytest.mark.integration  # starts servers

ROOT = Path(__file__).parents[2]
STUB = str(Path(__file__).with_name("sglang_stub.py"))
CHAT = "/v1/chat/completions"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    command = Sglang.command

    def stub_command(*args: Any) -> list[str]:
        python, m, module, *options = command(*args)
        assert (m, module) == ("-m", "sglang.launch_server")
        return [python, STUB, *options]

    monkeypatch.setattr(Sglang, "command", stub_command)
    monkeypatch.setattr(Sglang, "check", lambda *_: None)
    monkeypatch.setattr(Sglang, "gpus", lambda *_: 0)

    def make(**options: Any) -> RewardModelConfig:
        models = {}
        for name, architecture in (("judge", "Qwen2ForCausalLM"), ("scorer", "Qwen2ForSequenceClassification")):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
            given = {"model_path": str(tmp_path / name), "engine": "sglang", "start_timeout_s": 300.0} | options
            models[name] = ServedModelConfig(**given)
        return RewardModelConfig(models=models, log_dir=str(tmp_path / "logs"))

    return make


def _said(text: str, model: str = "judge") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()


def _text(text: str) -> bytes:
    return json.dumps({"model": "scorer", "text": text}).encode()


async def test_stubbed_sglang_behind_the_router(config: Any) -> None:
    async with RewardModelManager(config()) as models:
        url = f"http://{models.reward_router_address}"
        before = models.pids()
        watched = Watched([child.pid for child in psutil.Process(before["server 2"]).children(recursive=True)])

        status, body = await post(url, CHAT, _said("hello"))
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "hello")
        status, body = await post(url, "/classify", _text("four"))
        assert (status, json.loads(body)["embedding"]) == (200, [4.0])

        # Errors are passed on; the router rejects what SGLang would answer or die of.
        status, body = await post(url, CHAT, _said("x" * 101))
        assert (status, json.loads(body)["object"]) == (400, "error")
        status, body = await post(url, CHAT, _said("hello", "nonesuch"))
        assert (status, json.loads(body)["error"]["type"]) == (404, "RouterError")
        assert (await post(url, CHAT, _said("hello", "scorer")))[0] == 400
        assert (await post(url, "/classify", _text("")))[0] == 400
        assert models.pids() == before

        # A server that dies comes back at its address.
        os.kill(psutil.Process(before["server 2"]).children()[0].pid, signal.SIGKILL)
        assert watched.left_after() == 0
        watched.close()
        assert (await post(url, "/classify", _text("four")))[0] == 200
        assert models.pids()["server 2"] != before["server 2"]
        watched = Watched(
            [child.pid for pid in models.pids().values() for child in psutil.Process(pid).children(recursive=True)]
        )
    assert watched.left_after(0) == 0
    watched.close()


PARENT = """
import asyncio, json, sys
import psutil
from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import Sglang

model_path, stub = sys.argv[1:]
command = Sglang.command
Sglang.command = lambda *args: [sys.executable, stub, *command(*args)[3:]]
Sglang.check = lambda *_: None
Sglang.gpus = lambda *_: 0

async def main():
    options = {"engine": "sglang", "start_timeout_s": 300}
    async with RewardModelManager(RewardModelConfig(model_path=model_path, **options)):
        print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
        while True:  # Python notices a signal that comes just before the loop begins to wait only when that is over
            await asyncio.sleep(0.1)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stubbed_sglang_does_not_outlive_the_manager(config: Any, number: signal.Signals) -> None:
    model_path = config().models["judge"].model_path
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, model_path, STUB], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        # The router, the guard, the server, and what the server has started.
        assert len(pids) == 4
        watched = Watched(pids)
        parent.send_signal(number)
        parent.wait(60)
        assert watched.left_after(0 if number is signal.SIGINT else 60) == 0
    watched.close()
