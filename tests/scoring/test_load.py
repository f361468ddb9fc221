import inspect
import json
import pickle
import sys

import pytest

from reward_loop import FunctionLoadError, load_function
from reward_loop.scoring import load_object
from reward_loop.scoring.load import source_hash

SOURCE = """
from dataclasses import dataclass

LIMIT = 3

@dataclass
class Verdict:
    score: float

class Judge:
    def score(self, solution_str):
        return 0.5

judge = Judge()

def compute_score(solution_str):
    return 1.0

def compute_reward(solution_str):
    return 2.0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    return path


def test_a_function_in_a_file(file):
    for loaded in (
        load_function(str(file), "compute_score"),
        load_function(f"{file}:compute_score"),
        load_function(str(file)),
    ):
        assert loaded("x") == 1.0
    assert load_function(f"{file}:judge.score")("x") == 0.5  # a bound method, by a dotted name


@pytest.mark.parametrize("args", [("pkg://json", "dumps"), ("json:dumps",), ("pkg://json:dumps",), ("json", "dumps")])
def test_a_function_in_a_module(args):
    assert load_function(*args) is json.dumps


def test_a_ready_judge_has_a_short_name():
    from reward_loop.judges import Rubric

    assert load_function("judge:rubric") is Rubric
    with pytest.raises(
        FunctionLoadError, match=r"no ready judge 'judge:rubrik'; did you mean 'judge:rubric'\?.*pkg://"
    ):
        load_function("judge:rubrik")


def test_a_module_of_the_name_judge_is_loaded_by_its_full_name(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text("def rubric(solution_str):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("pkg://judge:rubric")("x") == 1.0
    assert load_function("judge", "rubric")("x") == 1.0


def test_the_same_file_is_the_same_module(file, monkeypatch):
    first = load_function(f"{file}:compute_score")
    monkeypatch.chdir(file.parent)
    second = load_function("reward.py:compute_score")
    assert first is second
    assert first.__module__ in sys.modules


def test_dataclasses_inspect_and_pickle_work_in_a_loaded_file(file):
    verdict = load_object(f"{file}:Verdict")(1.0)
    assert pickle.loads(pickle.dumps(verdict)) == verdict
    function = load_function(f"{file}:compute_score")
    assert pickle.loads(pickle.dumps(function)) is function
    assert "return 1.0" in inspect.getsource(function)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("x = 1\ny = 1 / 0\n", r"ZeroDivisionError: division by zero \(at .*broken.py:2\)"),
        ("import json\n\nrubric = json.loads('{')\n", r"JSONDecodeError.*broken\.py:3\)"),
        ("def f(:\n", r"SyntaxError.*broken.py, line 1"),
        ("raise SystemExit(3)\n", r"SystemExit: 3"),
    ],
)
def test_an_import_that_fails_shows_cause_and_line(tmp_path, source, cause):
    path = tmp_path / "broken.py"
    path.write_text(source)
    before = set(sys.modules)
    with pytest.raises(FunctionLoadError, match=cause):
        load_function(str(path))
    assert not {name for name in set(sys.modules) - before if "broken" in name}


def test_a_function_of_a_script_from_standard_input_has_no_source_hash(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__file__", "<stdin>")
    assert source_hash(test_what_cannot_be_loaded) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{folder}/rewards.py",), r"no such file.*did you mean 'reward.py'\?"),
        (
            ("{file}:compute_scores",),
            "did you mean 'compute_score'.* Callables there: Judge, Verdict, compute_reward, compute_score",
        ),
        (("{file}:LIMIT",), r"reward.py:LIMIT is a int, which cannot be called"),
        (("{file}:compute_score", "compute_reward"), "is also given: remove one"),
        (
            ("no_such_package_here.rewards:compute_score",),
            r"no module named 'no_such_package_here'.*file is written with",
        ),
    ],
)
def test_what_cannot_be_loaded(file, arguments, message):
    with pytest.raises(FunctionLoadError, match=message):
        load_function(*(argument.format(file=file, folder=file.parent) for argument in arguments))


def test_load_object_needs_a_name(file):
    with pytest.raises(FunctionLoadError, match="has no name of an object"):
        load_object(str(file))
