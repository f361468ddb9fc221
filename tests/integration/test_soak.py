from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.gsm8k import ROOT

pytestmark = pytest.mark.integration


def test_each_sample_ends_once_and_nothing_is_left() -> None:
    """In a process of its own, of which no other test has a part."""
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert set(result["outcomes"]) == {"scored", "unscored", "failed"}
    assert done.returncode == 0, done.stderr
