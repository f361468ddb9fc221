from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.tiny_models import build_tiny_model

# The same examples in every run, however slow the machine is. `--hypothesis-profile=default` draws others.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
# Hypothesis would mix in numbers and texts from the source of whatever modules this process has imported so far, which
# depends on the tests that came before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants

# What a terminal or a CI service says of colours and widths would show in what commands print; and no test is to meet a
# Ray that runs already.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH", "RAY_ADDRESS"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "80"
# Half a minute, Ray's default, may be too short for it to start beside a training on two cores.
for name in ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s"):
    os.environ.setdefault(name, "300")

# A shell that runs the tests in the background has them ignore SIGINT, which their children would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that train with verl first: two processes share the files, and the longest must not come last."""
    items.sort(key=lambda item: not item.path.is_relative_to(Path(__file__).with_name("verl")))


@pytest.fixture(scope="session")
def tiny_generative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a ``Qwen2ForCausalLM`` with random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("generative"), "generative")


@pytest.fixture(scope="session")
def tiny_discriminative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a ``Qwen2ForSequenceClassification`` with one label and random weights."""
    return build_tiny_model(tmp_path_factory.mktemp("discriminative"), "discriminative")
