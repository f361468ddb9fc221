"""``python -m reward_loop.verl.compat``: compares the installed verl with all names that the reward loop uses."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from reward_loop._util.standard_streams import open_standard_streams
from reward_loop.verl.compat import (
    COMMAND,
    CPU,
    SUPPORTED,
    TRAINING,
    findings,
    import_problem,
    installed_version,
    registered,
    verl_folder,
)

__all__ = ["main"]

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
    open_standard_streams()
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
        importable = []
        for module in modules:
            if problem := import_problem(module):
                print(f"  NO  {problem}")
                problems[problem] = None
            else:
                importable.append(module)
        used = registered(importable)
        for owner, group in groupby(findings(used), key=lambda finding: finding.use.owner):
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
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    sys.exit(main())
