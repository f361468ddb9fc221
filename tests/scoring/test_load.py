import inspect
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


@pytest.mark.parametrize("form", ["pair", "one_string", "default_name"])
def test_a_function_in_a_file(file, form):
    loaded = {
        "pair": lambda: load_function(str(file), "compute_score"),
        "one_string": lambda: load_function(f"{file}:compute_score"),
        "default_name": lambda: load_function(str(file)),
    }[form]()
    assert loaded("x") == 1.0


@pytest.mark.parametrize("args", [("pkg://json", "dumps"), ("json:dumps",), ("pkg://json:dumps",), ("json", "dumps")])
def test_a_function_in_a_module(args):
    import json

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


def test_a_bound_method_by_a_dotted_name(file):
    assert load_function(f"{file}:judge.score")("x") == 0.5


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


def test_a_missing_file_suggests_the_one_beside_it(file):
    with pytest.raises(FunctionLoadError, match=r"no such file.*did you mean 'reward.py'\?"):
        load_function(str(file.with_name("rewards.py")))


def test_a_missing_name_lists_what_is_there(file):
    with pytest.raises(FunctionLoadError) as caught:
        load_function(f"{file}:compute_scores")
    message = str(caught.value)
    assert "did you mean 'compute_score'?" in message
    assert "Callables there: Judge, Verdict, compute_reward, compute_score" in message


def test_something_that_cannot_be_called(file):
    with pytest.raises(FunctionLoadError, match=r"reward.py:LIMIT is a int, which cannot be called"):
        load_function(f"{file}:LIMIT")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("x = 1\ny = 1 / 0\n", r"ZeroDivisionError: division by zero \(at .*broken.py:2\)"),
        ("import no_such_module_here\n", r"ModuleNotFoundError.*no_such_module_here.*broken.py:1"),
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
    assert source_hash(test_a_missing_module) is None


def test_a_neighbour_that_is_not_on_the_path(tmp_path):
    (tmp_path / "my_helper_module.py").write_text("")
    path = tmp_path / "reward.py"
    path.write_text("import my_helper_module\n")
    with pytest.raises(
        FunctionLoadError, match="my_helper_module is in the same folder: add that folder to PYTHONPATH"
    ):
        load_function(str(path))


def test_a_missing_module():
    with pytest.raises(FunctionLoadError, match=r"no module named 'no_such_package_here'.*file is written with"):
        load_function("no_such_package_here.rewards:compute_score")


def test_two_names_that_differ(file):
    with pytest.raises(FunctionLoadError, match="is also given: remove one"):
        load_function(f"{file}:compute_score", "compute_reward")


def test_load_object_needs_a_name(file):
    with pytest.raises(FunctionLoadError, match="has no name of an object"):
        load_object(str(file))
