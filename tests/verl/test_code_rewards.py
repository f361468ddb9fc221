"""Sandboxes for code rewards in reward workers: verl's client of `sandbox_fusion`, and scorers of verl's plug-ins."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reward_loop.types import RewardSample
from reward_loop.verl.workers.reward_worker import RewardWorker

pytestmark = pytest.mark.integration  # imports verl

Settings = Callable[..., Any]
TESTS = json.dumps({"inputs": ["1 2"], "outputs": ["3"]})


class Sandbox(BaseHTTPRequestHandler):
    """Answers as the service does; a program "prints" its last digit."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        result = {"status": "Finished", "return_code": 0, "stdout": body["code"].strip()[-2] + "\n", "stderr": ""}
        content = json.dumps({"status": "Success", "run_result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def test_verls_client_of_a_sandbox_works_in_the_processes_of_the_default_scorer(with_function: Settings) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"sandbox_fusion.url=http://127.0.0.1:{server.server_port}/run_code"
        worker = RewardWorker(with_function(None, url), None)
        scores = []
        for printed in (3, 4):
            text = f"```python\nprint({printed})\n```"
            sample = RewardSample(text, data_source="codecontests", ground_truth=TESTS, uid=f"u_{printed}")
            scores.append((await worker.compute_score(sample))["reward_score"])
        server.shutdown()
    assert scores == [1.0, 0.0]


PLUGIN = """
import verl.utils.reward_score as scorers

usual = scorers.default_compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    if data_source == "of-the-plugin":
        return {"score": 0.75, "ran_in": "a micro-VM"}
    return usual(data_source, solution_str, ground_truth, extra_info, **options)

scorers.default_compute_score = compute_score
"""


async def test_a_plug_in_of_verl_adds_its_scorer_in_the_processes_of_the_default_scorer(
    with_function: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "micro_vm.py").write_text(PLUGIN)
    (info := tmp_path / "micro_vm-0.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: micro-vm\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nmicro_vm = micro_vm\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as if it were installed
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    worker = RewardWorker(with_function(None), None)
    reward = await worker.compute_score(RewardSample("x", data_source="of-the-plugin", ground_truth="1", uid="u_0"))
    assert reward["reward_score"] == 0.75
    assert reward["reward_extra_info"]["ran_in"] == "a micro-VM"
    other = await worker.compute_score(RewardSample("#### 7", data_source="openai/gsm8k", ground_truth="7", uid="u_1"))
    assert other["reward_score"] == 1.0
