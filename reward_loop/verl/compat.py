"""What the reward loop relies on in verl, and whether the installed verl has it.

Each module registers the names of verl and TransferQueue where it uses them: with `uses`, and with `overrides` on each
method that replaces one of verl's. A run compares the register with the installed verl at its start (`check`).
``python -m reward_loop.verl.compat`` prints it. Nothing here imports verl before a check needs it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from reward_loop.errors import RewardLoopError

SUPPORTED = ("0.9.1",)
"""The releases of verl that the tests train with, oldest first. A newer release is tried with ``make test VERL=...``
before it is added here."""

COMMAND = ("main_ppo", "task_runner")
"""The modules of ``reward_loop.verl`` that use verl before Ray starts."""

TRAINING = (
    *("agent_loop", "agent_loop_manager", "colocated", "managers", "pipeline", "recording_trainer"),
    *("own_scorers", "replay_buffer", "resume", "reward_changes", "separate_async", "task_runner"),
    *("tq_rows", "trainer"),
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


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, of a module or of an object, within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def registered(modules: Collection[str]) -> list[Use]:
    """Return what these modules of ``reward_loop.verl`` use, if they can be imported, in the order of the owners."""
    names = {_full_name(module) for module in modules if import_problem(module) is None}
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
    found = [*map(import_problem, modules), *(finding.problem for finding in findings(registered(modules)))]
    # All names of a missing module have the same problem.
    if problems := dict.fromkeys(filter(None, found)):
        listed = "\n  ".join(problems)
        raise VerlVersionError(
            f"reward_loop does not work with the installed verl {installed_version()}; supported: "
            f"{', '.join(SUPPORTED)}. Install one of these: pip install verl=={SUPPORTED[-1]}. Differences:\n  {listed}"
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
    except (ImportError, AttributeError, TypeError) as error:  # another module of verl may lack a name
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


DESCRIPTION = """\
Compares the installed verl with all names of verl and TransferQueue that reward_loop calls, overrides or reads, and
prints each with "ok" or "NO". Run it before a training with another version of verl.

The list contains the parameters that reward_loop uses. "**" stands for further ones. A method that reward_loop
overrides must have no others.

Exit status: 0 if all names fit, 1 if any is missing or has other parameters. A name that fits may still behave
differently: the tests train with verl {supported}.

The command imports verl's trainer, its workers and torch, which takes some 20 seconds of processor time. It starts
neither Ray nor any other process, and needs no GPU. --against compares a verl that is not installed: a checkout of its
repository. The packages that verl imports are the installed ones.
"""

MODULES = {
    "By the command, before Ray starts": COMMAND,
    "By the task runner, the trainer and the workers": TRAINING,
    "In addition, on a CPU": CPU,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m reward_loop.verl.compat",
        description=DESCRIPTION.format(supported=" and ".join(SUPPORTED)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", metavar="DIR", type=Path, help="the folder that contains the package verl")
    folder = parser.parse_args(argv).against
    if folder is not None and (problem := _put_first(folder.resolve())):
        parser.error(f"argument --against: {problem}")
    warnings.simplefilter("ignore")  # verl warns of engines that are not installed
    print(f"verl {installed_version()} in {verl_folder()}; reward_loop supports {', '.join(SUPPORTED)}")
    for package in ("TransferQueue", "ray", "torch"):
        print(f"{package} {_version(package)}")
    count, problems = 0, dict[str, None]()
    for title, modules in MODULES.items():
        print(f"\n{title}", flush=True)
        for problem in filter(None, map(import_problem, modules)):
            print(f"  NO  {problem}")
            problems[problem] = None
        for owner, group in groupby(findings(registered(modules)), key=lambda finding: finding.use.owner):
            print(f"  {owner}")
            for finding in group:
                count += 1
                print(f"    {'NO' if finding.problem else 'ok'}  {finding.use.name}  {finding.use.why}")
                if finding.problem:
                    problems[finding.problem] = None
    if not problems:
        print(f"\nAll {count} names fit.")
        return 0
    print(f"\nreward_loop does not work with verl {installed_version()}:")
    for problem in problems:
        print(f"  {problem}")
    return 1


def _put_first(folder: Path) -> str | None:
    """Have this folder's verl imported from now on. Returns why it cannot be, or ``None``."""
    if not (folder / "verl" / "version" / "version").is_file():
        return f"{folder} has no package verl. Give the root of a checkout"
    sys.path.insert(0, str(folder))
    if verl_folder() != folder / "verl":  # verl was imported before
        return f"verl is imported from {verl_folder()}, not from {folder}"
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    # Not `main` of this module: the other modules register their names in `reward_loop.verl.compat`.
    sys.exit(importlib.import_module("reward_loop.verl.compat").main())
