"""The location of the GSM8K data, for the tests that need it. The project does not contain the data."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("REWARD_LOOP_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))

needs_gsm8k = pytest.mark.skipif(
    not (DATA / "model_solutions.jsonl").exists(),
    reason=f"no GSM8K data in {DATA}: set REWARD_LOOP_GSM8K to a folder with model_solutions.jsonl",
)
