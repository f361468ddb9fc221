"""The installed verl: its release, its folder, its default options, and names of it that are replaced for a while.

reward_loop overrides methods that verl does not document, and a release of verl may change any of them. So each release
of reward_loop works with one of verl. mypy checks the overrides against it. Does not import verl.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from reward_loop.errors import RewardLoopError

SUPPORTED = "0.9.1"
"""The release of verl that the tests train with. ``make test VERL=...`` tries another one."""


class VerlVersionError(RewardLoopError):
    """The installed verl is not the one that reward_loop works with."""


def check_version(*, untested: bool) -> None:
    """Refuse any release of verl but `SUPPORTED`. ``untested`` is the option ``reward_loop.untested_verl``.

    Raises:
        VerlVersionError: another release is installed.
    """
    version = installed_version()
    if version != SUPPORTED and not untested:
        raise VerlVersionError(
            f"verl {version} is installed, and this release of reward_loop works with verl {SUPPORTED}: pip install "
            f"verl=={SUPPORTED}, or try yours with reward_loop.untested_verl=True"
        )


def installed_version() -> str:
    """Return the version of the installed verl."""
    return (verl_folder() / "version" / "version").read_text().strip()


def verl_folder() -> Path:
    """Return the directory of the package verl."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def verl_config_dir() -> Path:
    """Return the directory of verl's Hydra configuration."""
    return verl_folder() / "trainer" / "config"


@functools.cache
def verls_defaults() -> DictConfig:
    """Return verl's group ``reward`` with its defaults. Read-only."""
    loaded = OmegaConf.create({"reward": OmegaConf.load(verl_config_dir() / "reward" / "reward.yaml")})
    OmegaConf.set_readonly(loaded, True)  # all callers share it
    return loaded


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, of a module or of an object, within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
