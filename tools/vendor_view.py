"""Fetches the JavaScript libraries of `reward-loop view` anew, and checks their hashes.

python tools/vendor_view.py           # writes reward_loop/view/static/vendor/
python tools/vendor_view.py --check   # compares the files there with the packages, and writes nothing

The packages come from the registry of npm, with `npm pack`. For a new version, change `LIBRARIES`; `npm view NAME
dist.integrity` prints the hash.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "reward_loop" / "view" / "static" / "vendor"


@dataclass(frozen=True)
class Library:
    """A package of npm."""

    name: str
    version: str
    sha512: str
    """The hash of the package in base64, as npm prints it after ``sha512-``."""
    files: tuple[str, ...]
    """Its files that the page uses, and its licence."""


LIBRARIES = (
    Library(
        "tabulator-tables",
        "6.5.3",
        "nJ2QaqZzQvd9B4rf4LBnRxfb6sSqA/BX2OsXnSJ2d8k21oXDSTtFtOUrDap04a/6BDGivC/MByCxy43ugadJIg==",
        ("LICENSE", "dist/css/tabulator_simple.min.css", "dist/js/tabulator_esm.min.mjs"),
    ),
    Library(
        "uplot",
        "1.6.32",
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        ("LICENSE", "dist/uPlot.min.css", "dist/uPlot.esm.js"),
    ),
)


def fetch(library: Library, folder: Path) -> dict[str, bytes]:
    """Return the wanted files of a package, by their names without folders.

    Raises:
        SystemExit: the package has another hash.
    """
    pinned = f"{library.name}@{library.version}"
    subprocess.run(["npm", "pack", "--silent", pinned], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    content = (folder / f"{library.name}-{library.version}.tgz").read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != library.sha512:
        sys.exit(f"{pinned} has the hash sha512-{found}, expected sha512-{library.sha512}: do not use it")
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        members = {name: package.extractfile(f"package/{name}") for name in library.files}
        return {Path(name).name: _without_map(file.read()) for name, file in members.items() if file is not None}


def _without_map(content: bytes) -> bytes:
    """Return a file without the line that names its source map: the map is not vendored."""
    lines = content.splitlines(keepends=True)
    return b"".join(line for line in lines if b"# sourceMappingURL=" not in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the files, and write nothing")
    is_check = parser.parse_args().check
    for library in LIBRARIES:
        folder = VENDOR / f"{library.name}-{library.version}"
        with tempfile.TemporaryDirectory() as temporary:
            files = fetch(library, Path(temporary))
        for name, content in files.items():
            path = folder / name
            if is_check and path.read_bytes() != content:
                sys.exit(f"{path} differs from {library.name} {library.version}")
            if not is_check:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        print(f"{library.name} {library.version}: {', '.join(files)}")


if __name__ == "__main__":
    main()
