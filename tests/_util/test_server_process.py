from __future__ import annotations

import subprocess
import sys

from tests.gsm8k import ROOT


def test_an_app_that_fails_to_start_is_not_served() -> None:
    program = """
import argparse

from reward_loop._util.server_process import add_arguments, run

async def app(scope, receive, send):
    raise RuntimeError("no room")

parser = argparse.ArgumentParser()
add_arguments(parser)
run(app, parser.parse_args([]), "the app")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode not in (0, None)
    assert "RuntimeError: no room" in ended.stderr
