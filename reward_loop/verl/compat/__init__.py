"""What the reward loop relies on in verl, and whether the installed verl has it.

Each module registers the names of verl and TransferQueue where it uses them: with `uses`, and with `overrides` on each
method that replaces one of verl's. A run compares the register with the installed verl at its start (`check`).
``python -m reward_loop.verl.compat`` prints it. Nothing here imports verl before a check needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from reward_loop.errors import RewardLoopError

__all__ = [
    "COMMAND",
    "CPU",
    "SUPPORTED",
    "TRAINING",
    "Use",
    "UseCheck",
    "VerlVersionError",
    "check",
    "check_version",
    "findings",
    "import_problem",
    "installed_version",
    "overrides",
    "registered",
    "uses",
    "verl_folder",
]

SUPPORTED = ("0.9.1",)
"""The releases of verl that the tests train with, oldest first. A newer release is tried with ``make test VERL=...``
before it is added here."""

COMMAND = ("data_check", "main_ppo", "task_runner")
"""The modules of ``reward_loop.verl`` that use verl before Ray starts."""

TRAINING = (
    *("agent_loop", "agent_loop_manager", "cluster", "colocated", "gdpo", "managers", "pipeline", "recording_trainer"),
    *("own_scorers", "recovery", "replay_buffer", "reward_changes", "separate_async", "step_batch"),
    *("task_runner", "tq_checkpoint", "tq_rows", "trainer"),
)
"""Those that the task runner, the trainer and the workers import."""

CPU = ("cpu.checkpoint", "cpu.engine", "cpu.plugin", "cpu.rollout", "cpu.server")
"""Those that a run on a CPU imports in addition."""

F = TypeVar("F", bound=Callable[..., Any])


class VerlVersionError(RewardLoopError):
    """The installed verl is too old, or lacks names that the reward loop relies on."""


@dataclass(frozen=True, slots=True)
class Use:
    """A name of verl or TransferQueue, and the module that relies on it."""

    module: str
    """The module of the reward loop."""
    owner: str
    """``module`` or ``module:Class`` of verl."""
    name: str
    """An attribute; or a function with the parameters that the reward loop passes or declares, such as
    ``step(metrics, timing_raw)``. ``**`` at the end stands for further ones, which an override passes on."""
    overridden: bool = False
    """Whether the name is a method that the reward loop overrides. verl calls it, so all its parameters are listed."""

    @property
    def why(self) -> str:
        return f"{'overridden' if self.overridden else 'used'} in {self.module}"


@dataclass(frozen=True, slots=True)
class UseCheck:
    """A use, compared with the installed verl."""

    use: Use
    problem: str | None
    """What does not fit; ``None`` if the name fits."""


_register: dict[Use, None] = {}


def uses(module: str, owner: str, *names: str) -> None:
    """Register names that a module relies on; see `Use`.

    Example:
        uses(__name__, "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "poll_interval")
    """
    for name in names:
        _register[Use(module, owner, name)] = None


def overrides(cls: type) -> Callable[[F], F]:
    """Register a method that overrides a method of this class of verl."""

    def register(method: F) -> F:
        parameters = [*inspect.signature(method).parameters.values()][1:]  # without `self`
        words = ["**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]
        name = f"{method.__name__}({', '.join(words)})"
        _register[Use(method.__module__, f"{cls.__module__}:{cls.__qualname__}", name, overridden=True)] = None
        return method

    return register


def registered(modules: Collection[str]) -> list[Use]:
    """Import these modules of ``reward_loop.verl``, and return what they use, in the order of the owners.

    Raises:
        VerlVersionError: verl lacks names that modules import.
    """
    problems = [problem for module in sorted(modules) if (problem := import_problem(module))]
    if problems:
        raise _error(problems)
    names = {_full_name(module) for module in modules}
    return sorted((use for use in _register if use.module in names), key=lambda use: use.owner)


def import_problem(module: str) -> str | None:
    """Import a module of ``reward_loop.verl``. Returns why it cannot be imported, or ``None``."""
    try:
        importlib.import_module(_full_name(module))
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a decorator has other parameters
        return f"{_full_name(module)} cannot be imported ({error})"
    return None


def _full_name(module: str) -> str:
    return f"reward_loop.verl.{module}"


def check(*modules: str) -> None:
    """Check that verl has all names that these modules of ``reward_loop.verl`` use, with the parameters.

    Raises:
        VerlVersionError: names are missing, or have other parameters; the message lists all of them.
    """
    # All names of a missing module have the same problem.
    problems = dict.fromkeys(finding.problem for finding in findings(registered(modules)) if finding.problem)
    if problems:
        raise _error(problems)


def _error(problems: Collection[str]) -> VerlVersionError:
    listed = "\n  ".join(problems)
    return VerlVersionError(
        f"reward_loop does not work with the installed verl {installed_version()}; supported: {', '.join(SUPPORTED)}. "
        f"Install one of these: pip install verl=={SUPPORTED[-1]}. Differences:\n  {listed}"
    )


def findings(used: Collection[Use]) -> Iterator[UseCheck]:
    """Yield a finding for each name. Imports verl's modules."""
    for use in used:
        found, problem = _find(use.owner)
        if problem is None and (differs := _difference(found, use)):
            problem = f"{use.owner}{'.' if ':' in use.owner else ':'}{differs} ({use.why})"
        yield UseCheck(use, problem)


def _find(owner: str) -> tuple[Any, str | None]:
    """Return the module or class, or why there is none."""
    module, _, path = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return None, f"{module} cannot be imported ({error})"
    if path:
        if not hasattr(found, path):
            return None, f"{owner} is missing"
        found = getattr(found, path)
        found = getattr(found, "__ray_actor_class__", found)
    return found, None


def _difference(owner: Any, use: Use) -> str | None:
    """Return how verl's name differs from the registered one, or ``None``."""
    name, is_function, listed = use.name.removesuffix(")").partition("(")
    if not is_function:
        return None if _has_attribute(owner, name) else f"{name} is missing"
    function = getattr(owner, name, None)
    if not callable(function):
        return f"{name} is missing"
    words = [word for word in listed.split(", ") if word]
    takes_more = "**" in words
    used = [word for word in words if word != "**"]
    # Ray adds `_ray_trace_ctx` to the methods of an actor class.
    parameters = inspect.signature(function).parameters.values()
    actual = [p for p in parameters if p.name not in ("self", "_ray_trace_ctx")]
    named = {p.name: p for p in actual if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    # verl passes all parameters to an override; to verl, the reward loop passes those that it needs.
    needed = named.keys() if use.overridden else {name for name, p in named.items() if p.default is p.empty}
    if [parameter for parameter in named if parameter in used] == used and (takes_more or needed <= set(used)):
        return None
    return f"{name} has the parameters ({', '.join(map(str, actual))}) instead of ({listed})"


def _has_attribute(owner: Any, name: str) -> bool:
    """Return whether a module or class has an attribute, or a method of the class uses it on ``self``."""
    if hasattr(owner, name):
        return True
    for cls in getattr(owner, "__mro__", ()):
        if name in getattr(cls, "__annotations__", ()):
            return True
        methods = (inspect.unwrap(member) for member in vars(cls).values() if inspect.isfunction(member))
        if any(name in method.__code__.co_names for method in methods):
            return True
    return False


def installed_version() -> str:
    """Return the version of the installed verl, without importing it."""
    return (verl_folder() / "version" / "version").read_text().strip()


def verl_folder() -> Path:
    """Return the directory of the package verl, without importing it."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def check_version() -> None:
    """Print a warning if the installed verl is not one of `SUPPORTED`. Does not import verl.

    Raises:
        VerlVersionError: verl is older than all of them.
    """
    version = installed_version()
    if version in SUPPORTED:
        return
    if _is_too_old(version):
        raise VerlVersionError(
            f"verl {version} is installed, and reward_loop needs verl {SUPPORTED[0]} or later: pip install "
            f"verl=={SUPPORTED[-1]}"
        )
    _warn(version)


@functools.cache  # the command checks the version before and after Hydra composes the configuration
def _warn(version: str) -> None:
    print(
        f"warning: verl {version} is installed. reward_loop is tested with verl {', '.join(SUPPORTED)}; other versions "
        f"may fail: pip install verl=={SUPPORTED[-1]}. `python -m reward_loop.verl.compat` lists what differs.",
        file=sys.stderr,
    )


def _is_too_old(version: str) -> bool:
    try:
        return Version(version) < Version(SUPPORTED[0])
    except InvalidVersion:
        return False
