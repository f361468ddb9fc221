"""The release of verl: only one is accepted."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from reward_loop.verl.installed import SUPPORTED, VerlVersionError, check_version

pytestmark = pytest.mark.integration  # starts the command


def install(folder: Path, version: str) -> None:
    """Makes a package verl of a version, which must not be imported."""
    (folder / "verl" / "version").mkdir(parents=True)
    (folder / "verl" / "version" / "version").write_text(f"{version}\n")
    (folder / "verl" / "__init__.py").write_text("raise ImportError('verl was imported')\n")


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.2", "1.0", "an unusual version"])
def test_another_release_is_refused_unless_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    check_version(untested=False)
    install(tmp_path, version)
    spec = ModuleSpec("verl", None, origin=str(tmp_path / "verl" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    message = f"verl {version} is installed.* pip install verl=={SUPPORTED}, .*reward_loop.untested_verl=True"
    with pytest.raises(VerlVersionError, match=message):
        check_version(untested=False)
    check_version(untested=True)
