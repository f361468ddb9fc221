"""Who imports whom: read from the source, and held to the table in docs/dev/architecture.md."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gsm8k import ROOT

PACKAGE = ROOT / "reward_loop"

VERL = ["verl"]
RAY = ["verl", "agent/ray_agent.py", "serving/ray_server.py"]
"""Where Ray may be imported: in parts that start actors."""
MODELS = ["verl", "serving", "adapters/trl"]
"""Where torch and transformers may be imported."""

HEAVY = ("ray", "torch", "transfer_queue", "transformers", "trl", "verl")
"""Packages that take seconds to import."""

HOMES = {
    "verl": VERL,
    "hydra": VERL,
    "omegaconf": VERL,
    "tensordict": VERL,
    "transfer_queue": ["verl/tq_rows.py"],
    "ray": RAY,
    "torch": MODELS,
    "transformers": MODELS,
    "numpy": ["verl", "health.py", "agent/ray_agent.py", "verl/samples.py"],
    "duckdb": ["index"],
    "trl": ["adapters/trl"],
    "greenlet": ["adapters/trl"],
}

MOST_PRIVATE_ATTRIBUTES = 150
"""The largest number of private attributes of other objects that tests use. Lower it with each one that goes."""

CORE = frozenset(
    {"agent", "managers", "judges", "scoring", "client", "limits", "processes", "records", "config", "types", "errors"}
    | {"_util"}
)
"""What each sample passes, whatever the trainer. Other parts are satellites: each serves one kind of user."""

NEIGHBOURS = {
    # One command of verl starts servers, and computes the live numbers of its steps.
    "verl": {"serving", "router", "health"},
    "serving": {"router"},
    "adapters": {"offline"},
    # The report, the viewer and the audit ask the same questions.
    "view": {"index"},
    "offline": {"index"},
}
"""The satellites that a satellite imports. It may only become smaller."""

INSIDE: dict[str, set[str]] = {
    "agent.environment": {"CurrentScorer"},
    "agent.filter_forecast": {"FilterForecast"},
    "managers.base": {"decide", "open_records"},
    "managers.failures": {"Failures", "on_one_line"},
    "managers.groups": {"CALLER", "Caller"},
    "managers.registry": {"OPTIONS", "is_known", "names"},
    "managers.scorer": {"Scorer", "load_scorer", "returns_results", "scored", "scores_groups"},
    "scoring.load": {"source_hash"},
    "scoring.results": {"check_result", "OUTSIDE_THE_MAIN_THREAD"},
    "scoring.signature": {"BY_NAME", "resolve"},
}
"""The names in the rooms of the core that satellites import, although they are not in the ``__all__`` of the room. It
may only become smaller."""

MOST_NAMES = 155
"""The number of different names of the core that satellites import. It may only become smaller; the aim is 60."""

COMMAND = ("__main__", "cli")
"""The command, which may import everything."""

EXCEPTIONS: set[tuple[str, str, str]] = set()
"""File, package, and the function that imports it: each is called by those who use tensors."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsing takes most of the time of these tests."""
    return ast.parse(path.read_text())


def imports(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """Every module that is imported, with the function that does it, if any; also below ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            assert node.module
            if node.module == "reward_loop.config":  # its names are those of many parts
                yield from ((options()[alias.name], function) for alias in node.names)
            yield node.module, function
            # `from package import module` imports the module, too.
            yield from ((f"{node.module}.{alias.name}", function) for alias in node.names)
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from imports(node, name)


@functools.cache
def options() -> dict[str, str]:
    """Each name of `reward_loop.config`, with the module that declares it."""
    stub = ast.parse((PACKAGE / "config" / "__init__.pyi").read_text())
    found = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in found for alias in node.names}


@functools.cache
def sources() -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple((path.relative_to(PACKAGE).as_posix(), list(imports(tree_of(path)))) for path in paths)


def part_of(path: str) -> str:
    return Path(path).parts[0].removesuffix(".py")


def parts() -> dict[str, set[str]]:
    """Each part of the package that has code, with the other parts that it imports."""
    names = {part_of(path) for path, _ in sources()}
    found: dict[str, set[str]] = defaultdict(set)
    for path, imported in sources():
        if path == "__init__.py" or not (PACKAGE / path).stat().st_size:
            continue
        modules = [module.split(".") for module, _ in imported]
        used = {module[1] for module in modules if module[0] == "reward_loop" and len(module) > 1}
        found[part_of(path)] |= used & names - {part_of(path)}
    return dict(found)


def documented() -> dict[str, set[str]]:
    """The same, as the documentation has it, from the top layer to the bottom."""
    page = (ROOT / "docs/dev/architecture.md").read_text()
    (table,) = re.findall(r"<!-- begin layout -->\n(.*?)<!-- end layout -->", page, flags=re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`/").removesuffix(".py"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}


def public_modules() -> list[str]:
    page = (ROOT / "docs/dev/architecture.md").read_text()
    (listed,) = re.findall(r"<!-- begin public modules -->\n(.*?)<!-- end public modules -->", page, flags=re.DOTALL)
    return re.findall(r"`([\w.]+)`", listed)


def test_the_documented_layout_is_the_real_one() -> None:
    assert documented() == parts()


def test_the_core_imports_no_satellite() -> None:
    for part in CORE:
        assert parts().get(part, set()) <= CORE, part


def test_satellites_stand_alone() -> None:
    found = {part: imported - CORE for part, imported in parts().items() if part not in COMMAND}
    assert {(part, other) for part in found for other in found[part] - NEIGHBOURS.get(part, set())} == set()


def names_of_the_core() -> set[tuple[str, str]]:
    """Return each name of the core that a satellite imports, with the module that it imports it from."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if part_of(path.relative_to(PACKAGE).as_posix()) in {*CORE, *COMMAND, "__init__"}:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("reward_loop."):
                names = {(node.module, alias.name) for alias in node.names if node.module.split(".")[1] in CORE}
                found |= {(module, name) for module, name in names if module != "reward_loop._util"}  # modules
    return found


def test_satellites_import_the_public_names_of_the_core() -> None:
    inside = defaultdict(set)
    for module, name in names_of_the_core():
        # Of errors, types and helpers all is public, but for names with an underscore.
        if module in ("reward_loop.errors", "reward_loop.types") or module.split(".")[1] == "_util":
            is_public = not name.startswith("_")
        else:
            listed = getattr(importlib.import_module(module), "__all__", ())
            is_public = name in listed and (module.count(".") == 1 or module in public_modules())
        if not is_public:
            inside[module.removeprefix("reward_loop.")].add(name)
    assert {(module, name) for module in inside for name in inside[module] - INSIDE.get(module, set())} == set()


def test_no_test_imports_another_test() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = {(path.name, module) for path in files for module, _ in imports(tree_of(path))}
    assert {(name, module) for name, module in found if re.match(r"tests\.(\w+\.)*test_", module)} == set()


def test_only_public_modules_list_their_names() -> None:
    """Elsewhere, a list would only repeat the names without an underscore."""
    for path in sorted(PACKAGE.rglob("*.py")):
        part = part_of(path.relative_to(PACKAGE).as_posix())
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if re.search("^__all__ = ", path.read_text(), re.MULTILINE) and path.name != "__init__.py":
            assert part == "config" or module in public_modules(), path


def test_satellites_import_few_names_of_the_core() -> None:
    assert len({name for _, name in names_of_the_core()}) <= MOST_NAMES


def test_imports_point_downwards_only() -> None:
    order = list(documented())
    for part, imported in parts().items():
        for other in imported:
            assert order.index(other) > order.index(part), f"{part} imports {other}, which is not below it"


def test_the_core_listens_on_no_socket_but_that_of_the_web_server() -> None:
    listens = re.compile(r"\b(start_server|start_unix_server|create_server|listen)\(")
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        if part_of(relative) in CORE and relative != "_util/web_server.py":
            assert not listens.search(path.read_text()), path


def test_each_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_tests_go_through_public_faces() -> None:
    # Methods of verl that the package overrides are called as verl calls them.
    overriding = re.compile(r"^ *@override\n *(?:async )?def (\w+)", re.MULTILINE)
    overridden = {name for path in (PACKAGE / "verl").rglob("*.py") for name in overriding.findall(path.read_text())}
    private, unconstructed = [], []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Attribute):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            if node.attr == "__new__":
                unconstructed.append(place)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys")
            if re.match("_[^_]", node.attr) and not own and node.attr not in overridden:
                private.append(place)
    assert unconstructed == []
    assert len(private) <= MOST_PRIVATE_ATTRIBUTES, private


@pytest.mark.parametrize("package", HOMES)
def test_a_heavy_package_is_imported_at_home_only(package: str) -> None:
    strangers = [
        (path, package, function)
        for path, imported in sources()
        for module, function in imported
        if module.split(".")[0] == package
        and not any(path == home or path.startswith(f"{home}/") for home in HOMES[package])
    ]
    assert set(strangers) <= EXCEPTIONS


@pytest.mark.parametrize("folder", ["reward_loop", "examples", "benchmarks", "tools"])
def test_only_tests_import_tests(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        modules = {module.split(".")[0] for module, _ in imports(tree_of(path))}
        assert "tests" not in modules, path
        if folder in ("examples", "benchmarks"):
            assert "sys.path" not in path.read_text(), path


EARLY = ("reward_loop.verl.main_ppo", "hydra_plugins.reward_loop_plugin", "examples.verl_cpu")
"""What is imported before verl: verl reads its environment, such as its platform, while it is imported."""


@pytest.mark.processes
def test_what_is_imported_before_verl_imports_no_heavy_package() -> None:
    script = f"import importlib, sys\nfor name in {EARLY}:\n    importlib.import_module(name)\n"
    script += f"print(*sorted({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "\n"


@pytest.mark.processes
def test_benchmarks_and_examples_import_heavy_packages_after_their_options_are_read() -> None:
    paths = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    commands = [path for path in paths if "ArgumentParser(" in path.read_text()]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in commands]
    assert "benchmarks.trl" in modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    assert not {set(HEAVY)} & sys.modules.keys(), name\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
