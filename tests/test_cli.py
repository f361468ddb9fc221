import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections import Counter

import pytest
from typer.testing import CliRunner

from reward_loop import __main__ as entry_point
from reward_loop import __version__, cli
from reward_loop._util.process import GC_THRESHOLD
from reward_loop.offline.cli_options import json_or_text
from reward_loop.records.reader import RecordsReader

pytestmark = pytest.mark.processes

ROWS = [{"output": str(i), "gts": str(i - i % 2)} for i in range(6)]
FUNCTION = """
def compute_score(solution_str, ground_truth, weight=1, extra_info=None):
    if solution_str == "5":
        raise ValueError("five")
    return weight * float(solution_str == ground_truth)

class Judge:
    def compute_score(self, solution_str):
        return 1
    def post_process_scores(self, scores):
        return [score - len(scores) for score in scores]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rollouts.csv").write_text("output,gts\n")
    (tmp_path / "reward.py").write_text(FUNCTION)
    (tmp_path / "sourced.py").write_text("def compute_score(solution_str, data_source): return 1\n")
    (tmp_path / "lists.py").write_text("def compute_score(solution_strs): return [1 for _ in solution_strs]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args, code=0):
    result = CliRunner().invoke(cli.app, list(args))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def command(*args, **environment):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "reward_loop", *args],
        capture_output=True,
        env={**ENVIRONMENT, **environment},
        text=True,
        timeout=300,
    )


@contextlib.contextmanager
def scoring(folder, source, *options, prepare="pass"):
    """Yield a process that scores with the function in ``source``; ``prepare`` is a statement that it runs before."""
    (folder / "function.py").write_text(source)
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    handle = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    arguments = [sys.executable, "-c", f"{handle}; {prepare}; from reward_loop.cli import main; main()"]
    arguments += ["score", "function.py", "rollouts.jsonl", "-f", "solution_str=output", *options]
    with subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_until(running, condition):
    """Wait until a condition holds while a process is running."""
    while not condition():
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)


SCORE = ("score", "reward.py:compute_score", "rollouts.jsonl", "-f", "solution_str=output")
MAPPED = (*SCORE, "-f", "ground_truth=gts")


def exported(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_summary_and_records_beside_the_input(folder):
    shown = run(*MAPPED, "--export", "out/scores.jsonl")
    for part in ("rows: 6", "score mean 0.6", "1 failed, 5 scored", "reward-loop view rollouts.scored"):
        assert part in shown
    assert "sample line 6: compute_score (reward.py) raised ValueError: five" in shown
    assert [row["score"] for row in exported(folder / "out" / "scores.jsonl")] == [1.0, 0.0, 1.0, 0.0, 1.0, None]
    assert len(list(RecordsReader(folder / "rollouts.scored").rows())) == 6


def test_the_summary_of_score_as_json(folder):
    result = CliRunner().invoke(cli.app, [*MAPPED, "--json"])
    shown = json.loads(result.stdout)
    assert shown["outcomes"] == {"scored": 5, "unscored": 0, "failed": 1}
    assert (shown["rows"], shown["resumed"], shown["records"]) == (6, 0, "rollouts.scored")
    assert shown["reward"]["mean"] == pytest.approx(0.6)
    assert shown["causes"][0]["count"] == 1


def test_other_options_by_name(folder):
    (folder / "flaky.py").write_text(
        "calls = []\n"
        "def compute_score(solution_str):\n"
        "    calls.append(solution_str)\n"
        "    if calls.count(solution_str) == 1:\n"
        "        raise ConnectionError\n"
        "    return 1\n"
    )
    flaky = ("score", "flaky.py:compute_score", "rollouts.jsonl", "-f", "solution_str=output")
    assert "6 scored" in run(*flaky, "-O", "retry.initial_wait=0.001", "-O", "limits.default.max_concurrent=2")
    assert "-O retry.max_attempt: unknown option" in run(*flaky, "-O", "retry.max_attempt=1", code=2)
    assert "limits contradicts" in run(*flaky, "-O", "limits=1", "-O", "limits.judge=2", code=2)


def test_a_file_without_rows_is_noted(folder):
    (folder / "empty.jsonl").touch()
    assert "empty.jsonl: no rows" in run("score", "reward.py:Judge", "empty.jsonl", code=2)


def test_reward_kwargs_are_json_or_text(folder):
    run(*MAPPED, "--reward-kwarg", "weight=0.5", "--export", "out.jsonl")
    assert exported(folder / "out.jsonl")[0]["score"] == 0.5
    assert json_or_text("plain text") == "plain text"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((SCORE[0], "reward.py:compute_scor", SCORE[2]), "did you mean 'compute_score'?"),
        ((SCORE[0], "rewrad.py:compute_score", SCORE[2]), "no such file: rewrad.py"),
        ((SCORE[0], "reward.py:Judge", SCORE[2], "--reward-kwarg", "x=1"), "reward_kwargs x"),
        ((*MAPPED, "--manager", "niave"), "did you mean 'naive'?"),
        ((*MAPPED, "-O", "on_failed=crash"), "-O on_failed: Input should be 'raise', 'default' or 'mask'"),
        ((*MAPPED, "--isolation", "fork"), "'--isolation': 'fork' is not one of 'thread', 'process'"),
        (
            (SCORE[0], "lists.py", SCORE[2], "--manager", "group", "-f", "solution_str=output"),
            "line 1 has no field `group` or `uid`",
        ),
        ((*MAPPED, "-f", "solution=x"), "did you mean 'solution_str'?"),
        (("score", "reward.py", "none.jsonl"), "no such file: none.jsonl"),
        (("score", "reward.py", "."), ". contains no records"),
        (("score", "reward.py"), "missing argument 'FILE'"),
        ((*MAPPED, "--export", "/dev/full"), "--export /dev/full: name a JSONL file"),
        ((*MAPPED, "-O", "log_dir=x"), "-O log_dir has no effect: the records are in the folder --output"),
        (("score", "reward.py", "rollouts.csv"), "line 1: not JSON, with one object in each line"),
        ((*SCORE, "-f", "ground_truth=gt"), "none of the 6 rows can be scored. line 1: no field 'gt'"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_status_2(folder, args, message):
    shown = run(*args, code=2)
    assert shown.startswith("error: ")
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("command", "given", "shown"),
    [
        ("score", ("-O", "timeout=-1"), "error: -O timeout: Input should be greater than 0; got -1"),
        ("score", ("--option=nosuch=1",), "error: -O nosuch: unknown option"),
        ("score", ("-O", "default_score=NaN", "-O", "timeout=x"), "-O default_score: Input should be a finite number"),
        ("score", ("-O", "default_score=NaN", "-O", "timeout=x"), "-O timeout: Input should be a valid number"),
        ("check", ("-O", "timeout=-1"), "error: -O timeout: Input should be greater than 0; got -1"),
    ],
)
def test_an_option_out_of_range_is_named(folder, command, given, shown):
    arguments = ("reward.py:compute_score", "rollouts.jsonl", "-f", "solution_str=output")
    assert shown in run(command, *arguments, *given, code=2)


def test_an_option_with_two_values_is_refused(folder):
    assert "ground_truth is given twice" in run(*MAPPED, "-f", "ground_truth=gt", code=2)


def test_a_run_that_its_policy_stops_is_exit_status_1(folder):
    shown = run(*MAPPED, "-O", "on_failed=raise", code=1)
    assert shown.startswith("error: sample line 6: compute_score (reward.py) raised ValueError: five")


KEYED = """
import os
def compute_score(solution_str):
    if "THE_KEY" not in os.environ:
        raise RuntimeError("THE_KEY is not set")
    return 1
"""


def test_rows_that_failed_before_the_key_was_set_are_scored_again(folder, monkeypatch):
    (folder / "keyed.py").write_text(KEYED)
    (folder / "many.jsonl").write_text("".join(json.dumps({"output": str(i)}) + "\n" for i in range(70)))
    keyed = ("score", "keyed.py", "many.jsonl", "-f", "solution_str=output")
    shown = run(*keyed, code=1)
    assert "THE_KEY is not set" in shown
    assert "rerun the command to resume." in shown
    monkeypatch.setenv("THE_KEY", "secret")
    assert "70 scored" in run(*keyed)


def test_rows_left_out_by_the_budget_are_scored_again(folder):
    (folder / "unsure.py").write_text(
        "import os, reward_loop\n"
        "def compute_score(solution_str):\n"
        "    with reward_loop.limit('judge') as lease:\n"
        "        lease.used(cost=1)\n"
        "    return 1 if os.path.exists('sure') else None\n"
    )
    (folder / "many.jsonl").write_text("".join(json.dumps({"solution_str": str(i)}) + "\n" for i in range(5)))
    command = ("score", "unsure.py", "many.jsonl", "-O", "limits.judge.max_concurrent=1", "-O", "budget.at_cap=mask")
    shown = run(*command, "-O", "budget.max_cost=2", code=1)
    assert "the budget left 3 without a score. To score them, run the same command again" in shown
    (folder / "sure").touch()
    assert "3 scored, 2 unscored" in run(*command)


def test_a_run_without_any_score_is_exit_status_1_with_counted_causes(folder):
    (folder / "fails.py").write_text(
        "def compute_score(solution_str):\n"
        "    if solution_str == '2': raise KeyError('rubric')\n"
        "    raise ValueError('down')\n"
    )
    (folder / "none.py").write_text("def compute_score(solution_str): return None\n")
    shown = run("score", "fails.py", "rollouts.jsonl", "-f", "solution_str=output", code=1)
    assert "error: no row was scored: 6 failed" in shown
    assert "- 5 samples failed, first: sample line 1: compute_score (fails.py) raised Val" in shown
    assert "- 1 sample failed, first: sample line 3: compute_score (fails.py) raised KeyError: 'rubric'" in shown
    default = ("-O", "on_failed=default", "-o", "default")
    run("score", "fails.py", "rollouts.jsonl", "-f", "solution_str=output", *default, code=1)
    shown = run("score", "none.py", "rollouts.jsonl", "-f", "solution_str=output", "-o", "n", code=1)
    assert "error: no row was scored: 6 unscored" in shown


PRINTS = """
import os, sys
print("imported")
def compute_score(solution_str):
    print("printed", solution_str[:10])
    os.write(1, b"written\\n")
    if solution_str == "5":
        raise ValueError("five")
    return 1
"""


@pytest.mark.integration
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(("name", "problems"), [("score", None), ("check", 1)])
def test_what_a_function_prints_is_not_in_the_output_of_a_command(folder, name, problems, isolation):
    (folder / "prints.py").write_text(PRINTS)
    arguments = (name, "prints.py", "rollouts.jsonl", "-f", "solution_str=output", "-O", f"isolation={isolation}")
    done = command(*arguments, "--json")
    assert json.loads(done.stdout).get("problems") == problems, done.stderr
    for part in ("imported", "printed", "written"):
        assert part in done.stderr
    done = command(*arguments)
    assert "written" not in done.stdout
    assert ("1 failed, 5 scored" if name == "score" else "1 problem found") in done.stdout


@pytest.mark.integration
def test_post_process_scores_gets_the_rows_of_a_group(folder):
    judge = ("score", "reward.py:Judge", "rollouts.jsonl", "-f", "solution_str=output")
    run(*judge, "-f", "group=gts")
    sizes = Counter(row["gts"] for row in ROWS)
    found = {row["uid"]: row["reward"] for row in RecordsReader(folder / "rollouts.scored").rows()}
    assert sorted(found.values()) == sorted(1 - sizes[row["gts"]] for row in ROWS)


def test_a_run_is_not_resumed_with_other_options_or_an_edited_function(folder):
    stops = (*MAPPED, "-O", "on_failed=raise")
    assert "rerun the command to resume" in run(*stops, "--concurrency", "1", code=1)
    assert "with another " in run(*MAPPED, "-O", "on_failed=default", code=2)
    (folder / "reward.py").write_text(FUNCTION.replace('"5"', '"6"'))
    assert "with another function" in run(*stops, code=2)


MANAGERS = """
from reward_loop import RewardLoopManagerBase

class Unmade(RewardLoopManagerBase):
    def __init__(self, **kwargs):
        raise SystemExit(0)

class Raises(RewardLoopManagerBase):
    async def run_single(self, data):
        raise KeyError("x")

class Number(RewardLoopManagerBase):
    async def run_single(self, data):
        return 5

class NoInfo(RewardLoopManagerBase):
    async def run_single(self, data):
        return {"reward_score": 1.0, "reward_extra_info": 5}
"""


@pytest.mark.parametrize("command", ["score", "check"])
@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("Unmade", "the manager own.py:Unmade cannot be created: SystemExit: 0", 2),
        ("Raises", "line 1: Raises.run_single raised KeyError: 'x'", 1),
        ("Number", "line 1: Number.run_single returned 5, not a dict with reward_score", 1),
        ("NoInfo", "line 1: NoInfo.run_single returned {'reward_score': 1.0, 'reward_extra_info': 5}, not a dict", 1),
    ],
)
def test_errors_of_a_manager_are_one_message(folder, command, name, message, code):
    (folder / "own.py").write_text(MANAGERS)
    assert message in run(command, *MAPPED[1:], "--manager", f"own.py:{name}", code=code)


def test_invalid_parquet_is_refused(folder):
    (folder / "rollouts.parquet").write_text("PAR1, or so it seems")
    shown = run("score", "reward.py", "rollouts.parquet", code=2)
    assert "rollouts.parquet cannot be read as parquet" in shown


def test_ctrl_c_before_the_command_runs(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "Interrupted." in capsys.readouterr().err


def test_ctrl_c_during_the_imports(monkeypatch, capsys):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "reward_loop.cli", Interrupted("cli"))
    with pytest.raises(SystemExit, match="130"):
        entry_point.main()
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_help_and_version():
    shown = run("score", "--help")
    assert "Example" in shown
    assert "reward-loop score reward.py:compute_score rollouts.jsonl" in shown
    assert run("--version") == f"reward-loop {__version__}"
    assert run("-h") == run("--help")
    assert run("score", "-h") == run("score", "--help")
    assert "Usage: reward-loop [OPTIONS] COMMAND" in run(code=2).replace("root", "reward-loop")


def test_colons_in_messages_are_not_turned_into_emoji(folder):
    assert "a:sun:b is not a folder of records: it does not" in run("report", "a:sun:b", code=2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("score", "x", "y", "-f", "nonsense"), "--field: expected NAME=VALUE, got 'nonsense'"),
        (("score", "x", "y", "-O", "limits=1", "-O", "limits.judge=2"), "limits contradicts"),
        (("score", "x", "y", "--conc", "2"), "no such option: --conc"),
        (("report",), "missing argument 'DIR"),
        (("scor",), "no such command 'scor'"),
    ],
)
def test_errors_of_usage_have_one_style(args, message):
    shown = run(*args, code=2)
    assert shown.startswith("error: ")
    assert message in shown
    assert "Traceback" not in shown


def test_the_process_of_a_command_collects_garbage_less_often(folder):
    (folder / "gc_score.py").write_text("import gc\ndef compute_score(): return gc.get_threshold()[0]\n")
    done = command("score", "gc_score.py", "rollouts.jsonl", "-f", "solution_str=output", "--json")
    assert json.loads(done.stdout)["reward"]["mean"] == GC_THRESHOLD, done.stderr


def test_characters_that_a_terminal_cannot_encode_are_escaped(folder):
    (folder / "odd.jsonl").write_text(json.dumps({"solution_str": "\ud800\u2026"}) + "\n")
    (folder / "odd.py").write_text("def compute_score(solution_str): raise ValueError(solution_str)\n")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    done = command("score", "odd.py", "odd.jsonl", **ascii_only)
    assert done.returncode == 1, done.stderr
    assert r"raised ValueError: \ud800\u2026" in done.stdout


BLOCKS = """
import os, pathlib, threading

def compute_score(solution_str):
    with open("calls", "a") as calls:
        calls.write(solution_str + "\\n")
    if solution_str == "3" and not os.path.exists("go-on"):
        pathlib.Path("blocked").touch()
        threading.Event().wait()
    return 1
"""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_run_is_resumed(folder, number):
    def recorded():
        return sum(path.read_bytes().count(b"\n") for path in (folder / "rollouts.scored").glob("*.jsonl"))

    with scoring(folder, BLOCKS, "--concurrency", "1") as running:
        wait_until(running, lambda: (folder / "blocked").exists() and recorded() >= 3)
        running.send_signal(number)
        _, errors = running.communicate(timeout=120)
    if number == signal.SIGINT:
        assert running.returncode == 130
        assert "rerun the command to resume" in errors
    (folder / "go-on").touch()
    done = command("score", "function.py", "rollouts.jsonl", "-f", "solution_str=output", "--concurrency", "1")
    assert done.returncode == 0, done.stderr
    assert "3 of them by an earlier run" in done.stdout
    # Only the row that was being scored when the run died is called twice.
    assert (folder / "calls").read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]


INTERRUPTS = """
import signal, threading
def compute_score():
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait()
"""
# From threads of its own, so that they come while the main thread stops the first rows.
INTERRUPTS_OFTEN = """
import os, signal, threading
def compute_score():
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
"""


# However long they take on a slow machine, the interrupts of a burst belong together.
@pytest.mark.parametrize("source", [INTERRUPTS, INTERRUPTS_OFTEN], ids=["in a thread", "a burst"])
def test_ctrl_c_ends_a_run_once(folder, source):
    together = "from reward_loop._util import signals; signals._SAME_SECONDS = 600"
    with scoring(folder, source, prepare=together) as running:
        _, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    assert errors.count("Interrupted") == 1
    assert "rerun the command to resume" in errors
    assert "Traceback" not in errors


DEAF = """
import asyncio, pathlib
async def compute_score():
    pathlib.Path("deaf").touch()
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
"""


def test_a_second_ctrl_c_ends_a_run_that_does_not_stop(folder):
    apart = "from reward_loop._util import signals; signals._SAME_SECONDS = 0"
    with scoring(folder, DEAF, prepare=apart) as running:
        wait_until(running, (folder / "deaf").exists)
        for _ in range(3000):
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.1)
                break
        assert running.returncode == 130
        assert "Interrupted again: ended at once." in running.stderr.read()


BLOCKS_THE_LOOP = """
import pathlib
async def compute_score():
    pathlib.Path("blocks").touch()
    while True:
        pass
"""


def test_a_second_ctrl_c_ends_a_function_that_blocks_the_event_loop_and_names_its_line(folder):
    apart = "from reward_loop._util import signals; signals._SAME_SECONDS = 0"
    with scoring(folder, BLOCKS_THE_LOOP, prepare=apart) as running:
        wait_until(running, (folder / "blocks").exists)
        for _ in range(3000):
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(0.1)
                break
        assert running.returncode == 130
        assert re.search(r"Interrupted again in compute_score \(.*function\.py:[56]\)", running.stderr.read())
