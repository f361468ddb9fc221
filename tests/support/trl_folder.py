"""TRL for its tests, in a folder of its own: verl 0.9 cannot train where TRL 1.16 is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.gsm8k import ROOT

FOLDER = ROOT / ".venv" / "trl"

needs_trl = pytest.mark.skipif(not FOLDER.exists(), reason="there is no .venv/trl: run make trl")


@contextmanager
def trl_on_path() -> Iterator[None]:
    """TRL can be imported here, and in child processes."""
    path = os.pathsep.join([str(FOLDER), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("PYTHONPATH", path)
        yield
    for name in list(sys.modules):
        if name.split(".")[0] == "trl" or name == "reward_loop.adapters.trl.overlapped":
            del sys.modules[name]
