"""Measures which holes of reward rules `reward-loop check` finds: python -m benchmarks.attacks [--quick].

Rules with a hole, sound rules, mutants of the sound ones made by rule, verl's own scorers and what people write are
attacked with the same table (`benchmarks/_rules.py`); another table says what each of verl's scorers accepts and
refuses. If rewardlint can be imported, it judges the same rules; verl's geo3k needs mathruler. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import io
import json
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import _rules
from reward_loop.offline.attacks import KINDS, WRONG, rows_of
from reward_loop.offline.check import check
from reward_loop.offline.holes import NOT_CALLED, Attack, AttackReport, Outcome
from reward_loop.scoring import normalise
from reward_loop.types import RewardSample

Rows = Sequence[tuple[Any, str, str]]

_SOUND_FORMS = {"hashes": "#### {}", "one_box": "\\boxed{{}}", "exact": "{}", "choice": "Answer: {}"} | {
    "word": "<answer>{}</answer>",
    "latex": "\\boxed{{}}",
    "json": "{}",
}


def attack(rule: _rules.Rule, rows: Rows, seconds: float) -> AttackReport:
    """Attack a rule in this process; programs, which may change it, are scored in a fork of it."""
    end, prepared = time.monotonic() + seconds, rows_of(rows)

    async def score(index: int, answers: Sequence[str]) -> list[Outcome]:
        call = _forked if prepared[index].type == "program" else _called
        return [NOT_CALLED if time.monotonic() > end else call(rule, one, rows[index][0]) for one in answers]

    return asyncio.run(Attack(prepared, score).run())


def _called(rule: _rules.Rule, answer: str, reference: Any) -> Outcome:
    try:
        score, _ = normalise(rule(answer, reference))
    except BaseException as error:  # answers that a rule evaluates may raise anything
        return f"{type(error).__name__}: {error}"
    return None if score is None else float(score)


def _forked(rule: _rules.Rule, answer: str, reference: Any) -> Outcome:
    read, write = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(_called(rule, answer, reference)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    found: Outcome = json.loads(text) if text else "the process ended"
    return found


def mutants() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the module of rules with one change each, by rule, in the functions that sound rules share."""
    source = Path(_rules.__file__).read_text()
    names = ("thought", "last_line", "hashes", "box", "tag", "line", "value", "equal", "lowered", "worded", "compact")
    count = sum(1 for _ in _changes(ast.parse(source), names))
    for index in range(count):
        tree = ast.parse(source)
        what = list(_changes(tree, names, index))[index]
        module = types.ModuleType(f"mutant_{index}")
        module.__file__ = _rules.__file__
        sys.modules[module.__name__] = module  # for its dataclass
        exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), module.__dict__)
        yield what, module


def _changes(tree: ast.Module, names: Sequence[str], chosen: int = -1) -> Iterator[str]:
    """Yield what each change is, and make the chosen one."""
    index = -1
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names):
        for node in ast.walk(function):
            for what, change in _changes_of(node):
                index += 1
                if index == chosen:
                    change()
                yield f"{function.name}: {what}"


def _changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    def set_(name: str, value: Any, of: Any = node) -> Any:
        return lambda: setattr(of, name, value)

    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
        yield "== is in", set_("ops", [ast.In()])
        yield "== is >=", set_("ops", [ast.GtE()])
        yield "== is !=", set_("ops", [ast.NotEq()])
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        yield "and is or", set_("op", ast.Or())
    if isinstance(node, ast.Attribute) and node.attr in ("fullmatch", "rpartition"):
        yield f"another {node.attr}", set_("attr", {"fullmatch": "match", "rpartition": "partition"}[node.attr])
    if isinstance(node, ast.IfExp):
        yield "no condition", set_("test", ast.Constant(True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "the first, not the last", set_("operand", ast.Constant(0))
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ("(.+)" in node.value or "(.*?)" in node.value)
    ):
        yield "any characters before", set_("value", ".*" + node.value)
        yield "a part of it", set_("value", node.value.replace("(.+)", r"(\S+).*").replace("(.*?)", r"\s*(\S+).*?"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("strip", "rstrip"):
        yield (
            f"no {node.func.attr}",
            set_("attr", "__str__", node.func) if not node.args else set_("args", [ast.Constant(" ")]),
        )
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value is None:
        yield "0 for None", set_("value", ast.Constant(0))


def is_hole(rule: _rules.Rule, name: str, rows: Rows) -> bool:
    """Whether a mutant accepts a wrong text of a fixed list, which is not that of the attacks."""
    form = _SOUND_FORMS[name]
    for reference, _, _ in rows:
        right = _called(rule, form.replace("{}", reference), reference)
        wrong = _called(rule, form.replace("{}", "nothing"), reference)
        if not isinstance(right, float) or not isinstance(wrong, float) or right <= wrong:
            continue
        put = [
            f"x{reference}",
            f"{reference} y",
            f"{reference}9",
            f"8{reference}",
            f"z {reference} z",
            f"{reference}?x",
        ]
        texts = [form.replace("{}", one) for one in put]
        known, other = form.replace("{}", reference), form.replace("{}", "other")
        texts += [f"<think>{known}</think>\n{other}", f"{known}\n{other}", f"{known}\nBut no, it is\n{other}", "", "w"]
        outcomes = [_called(rule, text, reference) for text in texts]
        if any(isinstance(one, float) and one >= wrong + 0.75 * (right - wrong) for one in outcomes):
            return True
    return False


def lint(rule: _rules.Rule) -> int | None:
    """Return the number of rewardlint's false positives; ``None`` if it is not installed."""
    try:
        from rewardlint import audit
    except ImportError:
        return None

    def scored(solution_str: str, ground_truth: str) -> float | None:
        value = _called(rule, solution_str, ground_truth)
        return value if isinstance(value, float) else 0.0

    return len(audit(scored).false_positives)


Job = tuple[str, str, str, float, int]


def measure(job: Job) -> tuple[Job, AttackReport, int | None]:
    """Attack one rule on one set of rows."""
    group, name, rows_name, seconds, count = job
    table = {"sound": _rules.SOUND, "holes": _rules.HOLES}.get(group) or _rules.library()
    entry = table[name]
    with contextlib.redirect_stdout(io.StringIO()):
        report = attack(entry.rule, _rules.rows()[rows_name][:count], seconds)
        linted = lint(entry.rule) if entry.numeric and rows_name == entry.rows[0] else None
    return job, report, linted


def measure_mutants(part: tuple[int, int]) -> list[tuple[str, bool]]:
    """Attack every n-th mutant; return which are holes, and whether they were found."""
    found = []
    for index, (what, module) in enumerate(mutants()):
        if index % part[1] != part[0]:
            continue
        for name, entry in module.SOUND.items():
            rows = _rules.rows()[entry.rows[0]][:4]
            if name in _SOUND_FORMS and is_hole(entry.rule, name, rows):
                report = attack(entry.rule, rows, 2.0)
                found.append((f"{name}, {what}", bool(report.flagged(WRONG) or report.bonuses)))
    return found


def one_ms(solution_str: str, ground_truth: str) -> float:
    """A rule that takes 1 ms of processor time."""
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return float(_rules.equal(_rules.hashes(solution_str), ground_truth))


async def seconds_of_50_rows() -> float:
    """Return the seconds that an attack of 50 rows takes as in `check`: in processes, at 1 ms a call."""
    rows = _rules.rows()["gsm8k"][:50]
    samples = [RewardSample(text, ground_truth=reference, prompt=prompt) for reference, prompt, text in rows]
    attacked = (await check(one_ms, samples[:8], more=samples[8:])).attack
    assert attacked is not None
    assert attacked.attacked == len(rows) == 50, attacked
    return attacked.seconds


def table_row(name: str, report: AttackReport) -> str:
    """Return a row of the table in docs/files.md: the smallest answers of each kind, each as code."""

    def smallest(*levels: str) -> str:
        texts = (" ".join(kind.smallest[:48].split()) for kind in report.flagged(levels))
        return ", ".join(f"`{text}`" for text in texts) or "none"

    return f"| {name} | {smallest(*WRONG)} | {smallest('right', 'form')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and seconds for each rule")
    parser.add_argument("--detail", action="store_true", help="print the kinds that each rule accepts")
    options = parser.parse_args()
    count, seconds = (6, 3.0) if options.quick else (50, 20.0)
    tables = {"sound": _rules.SOUND, "holes": _rules.HOLES, "library": _rules.library()}
    jobs = [
        (group, name, rows, seconds * (4 if rows == "code" else 1), count if rows != "code" else 2)
        for group, table in tables.items()
        for name, entry in table.items()
        for rows in entry.rows
    ]
    found: dict[str, set[str]] = {group: set() for group in tables}
    linted: dict[str, set[str]] = {group: set() for group in tables}
    judged: dict[str, set[str]] = {group: set() for group in tables}
    answers = alarms = 0
    of_verl: list[str] = []
    workers = max(2, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        mutated = [pool.submit(measure_mutants, (part, workers)) for part in range(workers)]
        for (group, name, rows, *_), report, lints in pool.map(measure, jobs):
            kinds = [*report.flagged(WRONG), *report.bonuses]
            if kinds:
                found[group].add(name)
            if lints is not None:
                judged[group].add(name)
                linted[group] |= {name} if lints else set()
            if group == "sound":
                wrong = [kind for kind in report.kinds if kind.level in WRONG]
                answers += sum(kind.answers for kind in wrong)
                alarms += sum(kind.flagged for kind in kinds)
            if name.startswith("verl"):
                of_verl.append(table_row(f"{name} ({rows})", report))
            if group == "library" or options.detail:
                print(f"{group} {name} ({rows}): {report.attacked} of {report.given} rows, {report.seconds:.1f} s")
                for kind in [*kinds, *report.flagged(("contract", "right", "form"))]:
                    print(f"    {kind.level} {kind.name}: {kind.flagged} of {kind.rows}, {kind.smallest[:60]!r}")
                if report.note or report.refused:
                    print(f"    {report.note} {len(report.refused)} references refused")
        mutant_holes = [one for part in mutated for one in part.result()]
    print("\n".join(["| Scorer | Right for it, but wrong | Refused, but right |", "|---|---|---|", *of_verl]))
    missed = sorted(set(tables["holes"]) - found["holes"])
    survivors = [name for name, is_found in mutant_holes if not is_found]
    print(f"{len(KINDS)} kinds; holes found: {len(found['holes'])} of {len(tables['holes'])}; missed: {missed}")
    print(f"mutants found: {len(mutant_holes) - len(survivors)} of {len(mutant_holes)}; missed: {survivors}")
    print(f"false alarms: {alarms} of {answers} answers to sound rules: {sorted(found['sound'])}")
    lint_share = None
    if judged["holes"]:
        lint_share = round(len(linted["holes"]) / len(judged["holes"]), 3)
        print(f"rewardlint: {len(linted['holes'])} of {len(judged['holes'])} holes in rules of numbers", end="; ")
        print(f"{len(linted['sound'])} of {len(judged['sound'])} sound ones: {sorted(linted['sound'])}")
    else:
        print("rewardlint was not run: it is not installed")
    figures = {
        "found_share": round(len(found["holes"]) / len(tables["holes"]), 3),
        "false_alarm_share": round(alarms / max(1, answers), 5),
        "mutants_found_share": round(1 - len(survivors) / max(1, len(mutant_holes)), 3),
        "rewardlint_found_share": lint_share,
        "seconds_50_rows": round(asyncio.run(seconds_of_50_rows()), 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
