from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_model

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
