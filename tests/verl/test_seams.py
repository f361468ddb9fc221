"""The patches in ``tools/verl-seams``: what verl could offer in place of the methods that are overridden now."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from reward_loop.verl.installed import SUPPORTED, installed_version, verl_folder
from tests.support.gsm8k import ROOT

PATCHES = sorted((ROOT / "tools" / "verl-seams").glob("*.patch"))


@pytest.fixture(autouse=True)
def _of_this_release() -> None:
    if installed_version() != SUPPORTED:
        pytest.skip(f"the patches are for verl {SUPPORTED}")


def patched(folder: Path, patches: Iterable[Path]) -> list[Path]:
    """Copies the files that the patches change into a folder, applies the patches, and returns the files."""
    changed = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)  # such as verl/protocol.py
    names = sorted({name for patch in patches for name in changed.findall(patch.read_text())})
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(verl_folder().parent / name, folder / name)
    for patch in patches:
        done = subprocess.run(
            ["git", "apply", patch],
            cwd=folder,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return [folder / name for name in names]


@pytest.mark.parametrize("patches", [*([patch] for patch in PATCHES), PATCHES], ids=lambda patches: patches[-1].stem)
def test_each_patch_applies_alone_and_after_the_others(tmp_path: Path, patches: list[Path]) -> None:
    for file in patched(tmp_path, patches):
        text = file.read_text()
        assert text != (verl_folder().parent / file.relative_to(tmp_path)).read_text()
        compile(text, file, "exec")
