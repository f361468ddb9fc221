from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from examples.tiny_models import build_tiny_model

# The same examples in every run, without time limits. `--hypothesis-profile=default` uses random examples.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
# By default, hypothesis also uses constants from the source of the imported modules. They depend on the order of tests.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants

# These variables change the colors and widths of command output. RAY_ADDRESS would connect tests to a running Ray.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH", "RAY_ADDRESS"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "80"
# Ray's default of 30 s may be too short for its start while a training runs on two cores.
for name in ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s"):
    os.environ.setdefault(name, "300")

# A shell that starts the tests in the background sets SIGINT to be ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that train with verl first: two processes share the files, and the slowest must not start last."""
    items.sort(key=lambda item: not item.path.is_relative_to(Path(__file__).with_name("verl")))


@pytest.fixture(scope="session")
def tiny_generative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a ``Qwen2ForCausalLM`` with random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("generative"), "generative")


@pytest.fixture(scope="session")
def tiny_discriminative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a ``Qwen2ForSequenceClassification`` with one label and random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("discriminative"), "discriminative")
