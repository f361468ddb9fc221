from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from examples.tiny_models import build_tiny_model

# No time limits for examples: the machine may be busy. `steady` uses the same seed in every run. Examples also contain
# constants from the source of the modules imported so far, so they can differ between selections of tests.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("steady")

# These variables change the colors and widths of command output. RAY_ADDRESS would connect tests to a running Ray.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH", "RAY_ADDRESS"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "80"
# Ray's defaults of 30 s may be too short for its start while a training runs on two cores. Another limit is fixed: an
# agent of Ray has 15 s to start. So the workers of the training get less of the cores.
os.environ |= {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_niceness": "5",
    # For a dashboard, Ray measures its processes every five seconds.
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",
}

# A shell that starts the tests in the background sets SIGINT to be ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

INTEGRATION_TIMEOUT_S = 1300
"""The time limit of an integration test. Two runs of verl may precede one: `TIMEOUT_S` of `support.fork_server`."""

LONGEST = (
    "test_gpu_benchmark.py",
    "verl/test_training.py",
    "serving/test_real_sglang.py",
    "verl/test_two_nodes.py",
    "verl/test_pipeline.py",
    "verl/test_separate_async_run.py",
    "verl/test_killed_trainer.py",
    "serving/test_vllm.py",
    "view/test_page.py",
    "processes/test_pool.py",
    "integration/test_demo.py",
    "test_pages.py",
    "verl/test_workers.py",
    "verl/test_colocated.py",
    "offline/test_check.py",
    "examples/test_generative_judge.py",
    "serving/test_manager.py",
    "verl/test_stock_verl.py",
    "serving/test_several_nodes.py",
    "adapters/trl/test_trainers.py",
    "test_docs.py",
    "integration/test_wheel.py",
    "test_cli.py",
)
"""The files that take longest, in this order; then come the others with slow tests. Processes share the files, and the
longest must not start last. One of the first three uses no Ray: on a busy machine, Ray's start can exceed a fixed
limit, and is then repeated."""

SLOW_ONLY = {
    "fast": re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(integration|processes)", re.MULTILINE),
    "not integration": re.compile(r"^pytestmark = \[?\s*pytest\.mark\.integration", re.MULTILINE),
}
"""What is selected, and the mark of a file without such a test."""

NEEDS_VERL = re.compile(
    r"^ *(from|import) verl\b|importorskip\([\"']verl|^from tests\.(verl|managers\.letters)\b", re.MULTILINE
)
"""What a file outside of ``tests/verl`` has if some of its tests need verl. All of its tests have the mark ``verl``."""


def needs_verl(path: Path) -> bool:
    tests = Path(__file__).parent
    return path.is_relative_to(tests / "verl") or NEEDS_VERL.search(path.read_text()) is not None


@pytest.fixture(scope="module", autouse=True)
def no_test_leaves_ray_connected() -> Iterator[None]:
    """Ray starts by itself when an unconnected process asks it anything, and the next file would use that Ray."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        ray.shutdown()
        pytest.fail("a test of this file left Ray connected")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off for the imports, whose time it doubles, and leave their objects out of it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a selected test: verl takes seconds to import."""
    selected = config.getoption("-m")
    if selected not in SLOW_ONLY or collection_path.suffix != ".py":
        return None
    left_out = selected == "fast" and needs_verl(collection_path)
    return left_out or SLOW_ONLY[selected].search(collection_path.read_text()) is not None or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set marks and the time limit of integration tests, let these fail once, and run slow files first.

    On a busy machine, Ray, vLLM and SGLang can exceed fixed time limits of their own. The summary shows the errors of
    the first runs.
    """
    folder = Path(__file__).parent
    of_verl = {path: needs_verl(path) for path in {item.path for item in items}}
    for item in items:
        integration = item.get_closest_marker("integration")
        processes = integration or item.get_closest_marker("processes")
        item.add_marker("verl" if of_verl[item.path] else "processes" if processes else "fast")
        if integration:
            item.add_marker(pytest.mark.flaky(reruns=1))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(INTEGRATION_TIMEOUT_S))
    ranks = {folder / name: rank for rank, name in enumerate(LONGEST)}
    slow = {item.path for item in items if not item.get_closest_marker("fast")}
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), item.path not in slow))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests ran a second time."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def tiny_generative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a ``Qwen2ForCausalLM`` with random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("generative"), "generative")


@pytest.fixture(scope="session")
def tiny_discriminative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a ``Qwen2ForSequenceClassification`` with one label and random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("discriminative"), "discriminative")
