import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import reward_loop

HEAVY = {"torch", "ray", "transformers", "verl", "fastapi", "pyarrow", "numpy"}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_is_the_object_of_its_module():
    stub = ast.parse(Path(reward_loop.__file__).with_suffix(".pyi").read_text())
    imports = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    modules = {alias.name: line.module for line in imports for alias in line.names}
    assert reward_loop.__all__ == sorted([*modules, "__version__"])
    assert set(reward_loop.__all__) <= set(dir(reward_loop))
    for name, module in modules.items():
        assert getattr(reward_loop, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(reward_loop, "no_such_name")


@pytest.mark.processes
def test_import_is_quick():
    # Time on a processor: waiting for one on a busy machine does not count.
    code = "import time; t = time.process_time(); import reward_loop; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.3


@pytest.mark.processes
def test_import_loads_no_heavy_package_and_the_agent_needs_none_of_the_extras():
    code = """
import asyncio, sys, reward_loop
print(*{name.partition('.')[0] for name in sys.modules})
from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardSample

async def main():
    async with RewardAgent(NaiveRewardLoopManager(compute_score=lambda solution_str: 1)) as agent:
        await agent.submit([RewardSample("x")])

asyncio.run(main())
print(*{name.partition('.')[0] for name in sys.modules})
"""
    imported, used = run(code).splitlines()
    assert not {*HEAVY, "aiohttp"} & set(imported.split())
    assert not HEAVY & set(used.split())


@pytest.mark.processes
def test_the_training_command_names_the_missing_verl():
    code = """
import runpy, sys
sys.modules["verl"] = None
runpy.run_module("reward_loop.verl.main_ppo", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "verl is not installed; from a clone of reward_loop: pip install '.[verl]'" in done.stderr
