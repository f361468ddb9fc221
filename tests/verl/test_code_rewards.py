"""Sandboxes for code rewards in reward workers: verl's client of `sandbox_fusion`, and scorers of verl's plug-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from reward_loop.types import RewardSample
from reward_loop.verl.workers.reward_worker import RewardWorker
from tests.support.servers import serving

pytestmark = pytest.mark.integration  # imports verl

Settings = Callable[..., Any]
TESTS = json.dumps({"inputs": ["1 2"], "outputs": ["3"]})


sandbox = FastAPI()


@sandbox.post("/run_code")
async def run_code(body: dict[str, Any]) -> dict[str, Any]:
    """Answers as the service does; a program "prints" its last digit."""
    result = {"status": "Finished", "return_code": 0, "stdout": body["code"].strip()[-2] + "\n", "stderr": ""}
    return {"status": "Success", "run_result": result}


PLUGIN = """
import verl.utils.reward_score as scorers

usual = scorers.default_compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    if data_source == "of-the-plugin":
        return {"score": 0.75, "ran_in": "a micro-VM"}
    return usual(data_source, solution_str, ground_truth, extra_info, **options)

scorers.default_compute_score = compute_score
"""


async def test_sandboxes_and_plug_ins_of_verl_work_in_the_processes_of_the_default_scorer(
    with_function: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "micro_vm.py").write_text(PLUGIN)
    (info := tmp_path / "micro_vm-0.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: micro-vm\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nmicro_vm = micro_vm\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as if it were installed
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    samples = [
        RewardSample("x", data_source="of-the-plugin", ground_truth="1", uid="u_0"),
        RewardSample("#### 7", data_source="openai/gsm8k", ground_truth="7", uid="u_1"),
        *(
            RewardSample(f"```python\nprint({n})\n```", data_source="codecontests", ground_truth=TESTS, uid=f"u_{n}")
            for n in (3, 4)
        ),
    ]
    async with serving(sandbox) as url:
        worker = RewardWorker(with_function(None, f"sandbox_fusion.url={url}/run_code"), None)
        rewards = [await worker.compute_score(sample) for sample in samples]
    assert [reward["reward_score"] for reward in rewards] == [0.75, 1.0, 1.0, 0.0]
    assert rewards[0]["reward_extra_info"]["ran_in"] == "a micro-VM"
