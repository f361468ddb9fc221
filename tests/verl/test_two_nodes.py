"""verl's trainer on two nodes of this machine, each with its own address, processes and shared memory: the second node,
which has a reward worker and a reward model server, is lost as a whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from benchmarks.lost_node import train_and_lose_node
from examples.nodes import ROOT, RayNodes, why_no_nodes
from tests.support.fork_server import forking_python

pytestmark = pytest.mark.integration

FORK_SERVER = """
import sys
from tests.support.preload import preloaded
with preloaded(name="reward-loop-nodes") as executable:
    print(executable, flush=True)
    sys.stdin.read()
"""
"""The program on each node from whose process Ray forks its workers."""


def test_two_nodes_lose_and_repeat_nothing_when_a_whole_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    run = training.run
    with RayNodes(tmp_path / "nodes", FORK_SERVER) as nodes:
        python = str(forking_python(tmp_path, nodes.said))

        def run_forked(command: list[str], *rest: Any) -> Any:
            words = {sys.executable: python, f"--wdns={ROOT}": f"--wdns={tmp_path}"}
            return run([words.get(word, word) for word in command], *rest)

        monkeypatch.setattr(training, "run", run_forked)
        training.prepare(tmp_path)
        option = f"+ray_kwargs.ray_init.runtime_env.py_executable={nodes.said!r}"
        # Until Ray detects the loss, calls fail at once. With a cut network, as in the benchmark, they only wait.
        found = train_and_lose_node(nodes, tmp_path, lambda done: None, option, cut=False)
    assert "lost after step 1" in found.happened["node"]
    assert not found.wrong
