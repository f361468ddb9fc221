from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from reward_loop._util.sockets import is_loopback, listen
from reward_loop._util.web_server import api_key, open_listener, stop_on_disconnect
from reward_loop.errors import ConfigError
from tests.gsm8k import ROOT


def test_an_app_that_fails_to_start_is_not_served() -> None:
    program = """
import argparse

from reward_loop._util.web_server import add_arguments, serve

async def app(scope, receive, send):
    raise RuntimeError("no room")

parser = argparse.ArgumentParser()
add_arguments(parser)
serve(app, parser.parse_args([]), "the app")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode not in (0, None)
    assert "RuntimeError: no room" in ended.stderr


def test_the_key_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setenv("NO_KEY", "")
    assert api_key(None) is None
    assert api_key("A_KEY") == "secret"
    for name in ("NO_KEY", "NOT_SET"):
        with pytest.raises(ConfigError, match=f"--api-key-env {name}: this environment variable is not set"):
            api_key(name)


def test_an_address_beyond_loopback_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        open_listener("0.0.0.0", 0, None)
    with open_listener("0.0.0.0", 0, "secret") as listener:
        assert not is_loopback(listener)
    with open_listener("127.0.0.1", 0, None) as listener:
        assert is_loopback(listener)


def test_a_port_in_use_is_an_error_with_advice() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .* --port 0"):
            open_listener("127.0.0.1", port, None)


class Channel:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        return await self.messages.get()


async def test_work_that_is_done_first() -> None:
    done = []

    async def work() -> None:
        done.append(True)

    assert await stop_on_disconnect(Channel().receive, work)
    assert done


async def test_a_client_that_leaves_cancels_it() -> None:
    channel = Channel()
    cancelled = asyncio.Event()

    async def work() -> None:
        await channel.messages.put({"type": "http.request"})
        await channel.messages.put({"type": "http.disconnect"})
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert not await stop_on_disconnect(channel.receive, work)
    assert cancelled.is_set()


async def test_an_exception_of_the_work_is_raised_unchanged() -> None:
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await stop_on_disconnect(Channel().receive, work)
