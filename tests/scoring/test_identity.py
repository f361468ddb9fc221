import asyncio
import copy
import dataclasses
import enum
import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop.scoring.identity import IdentityError, identity_of


@dataclasses.dataclass
class Rule:
    pattern: re.Pattern
    weights: dict

    def compute_score(self, solution_str):
        return self.weights["hit"] * bool(self.pattern.search(solution_str))


class Kind(enum.Enum):
    STRICT = 1
    LAX = 2


class Locked:
    def __init__(self):
        self.guards = {"one": threading.Lock()}

    def compute_score(self, solution_str):
        return 1


class Tokenizer:
    def __init__(self, name_or_path):
        self.name_or_path = name_or_path
        self.lock = threading.Lock()


def holding(value):
    """A function that captured it."""
    return lambda solution_str: (value, solution_str)


def with_default(value):
    def score(solution_str, more=value):
        return more

    return score


def recursive(depth):
    def score(solution_str):
        return score(solution_str[1:]) if len(solution_str) > depth else depth

    return score


def decorated(function):
    lock = threading.Lock()

    @functools.wraps(function)
    def wrapper(solution_str):
        with lock:
            return function(solution_str)

    return wrapper


@decorated
def at_top(solution_str):
    return len(solution_str)


@functools.lru_cache
def cached(solution_str):
    return len(solution_str)


def knows_itself(name):
    found = {"name": name}
    found["self"] = found
    return holding(found)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars | st.frozensets(st.text(), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(deadline=None)
@given(values)
def test_equal_values_give_one_identity(value):
    for make in (holding, with_default, functools.partial(functools.partial, at_top)):
        assert identity_of(make(value)) == identity_of(make(copy.deepcopy(value)))


@settings(deadline=None)
@given(values, values)
def test_other_values_give_another(first, second):
    for make in (holding, with_default, lambda value: functools.partial(at_top, more=value)):
        same = identity_of(make(first)) == identity_of(make(second))
        assert same == (written(first) == written(second))


def written(value):
    """The value in words, in which 1, 1.0 and True are different, and the order of keys counts for nothing."""
    if isinstance(value, dict):
        return "dict", sorted((key, repr(written(item))) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, [written(item) for item in value]
    return ("set", sorted(value)) if isinstance(value, frozenset) else repr(value)


MANY = {
    "lambda": lambda solution_str: 1,
    "another": lambda solution_str: 2,
    "set": lambda solution_str: solution_str in {"a", "b", "c"},
    "found": at_top,
    "cached": cached,
    "cached lambda": functools.lru_cache(lambda solution_str: 1),
    "another cached lambda": functools.lru_cache(lambda solution_str: 2),
    "partial": functools.partial(at_top, factor=2),
    "partial's position": functools.partial(at_top, 2),
    "recursive": recursive(2),
    "recursive, deeper": recursive(3),
    "knows itself": knows_itself("a"),
    "knows itself, and is another": knows_itself("b"),
    "object": Rule(re.compile("a+"), {"hit": 1}),
    "pattern": Rule(re.compile("a*"), {"hit": 1}),
    "flags": Rule(re.compile("a+", re.IGNORECASE), {"hit": 1}),
    "weights": Rule(re.compile("a+"), {"hit": 2}),
    "method": Rule(re.compile("a+"), {"hit": 1}).compute_score,
    "class": functools.partial(Rule, weights={"hit": 1}),
    "strict": holding(Kind.STRICT),
    "lax": holding(Kind.LAX),
    "path": holding(Path("a")),
    "words": holding({"one", "two", "three", "four"}),
    "event": holding(asyncio.Event()),
    "module": holding(os),
    "another module": holding(re),
    "function": holding(at_top),
    "tokenizer": holding(Tokenizer("small")),
    "another tokenizer": holding(Tokenizer("large")),
}


def test_each_has_its_own():
    assert len({identity_of(value) for value in MANY.values()}) == len(MANY)


@pytest.mark.integration
def test_it_is_the_same_in_every_run():
    code = "from tests.scoring.test_identity import *; print([identity_of(value) for value in MANY.values()])"
    shown = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        shown.add(done.stdout)
    assert len(shown) == 1


def test_functions_of_a_notebook_have_their_code():
    def run_cell(source):
        namespace = {"__name__": "__nowhere__"}
        exec(source, namespace)
        return namespace["score"]

    first, second, third = (run_cell(f"def score(solution_str): return {score}") for score in (1, 2, 1))
    assert identity_of(first) == identity_of(third) != identity_of(second)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (holding(threading.Lock()), r"'value' in holding.<locals>.<lambda> is a lock \(cannot pickle"),
        (holding([{"a": threading.Lock()}]), r"'value' in .*\['a'\] is a lock"),
        (with_default(threading.Lock()), "a default of with_default.<locals>.score is a lock"),
        (functools.partial(at_top, lock=threading.Lock()), r"partial of it\['lock'\] is a lock"),
        (Locked().compute_score, r"its object\.guards\['one'\] is a lock"),
        (holding(type("Made", (), {})), "'value' in .* is the class Made, which its module does not have"),
        (holding(functools.reduce(lambda inner, _: [inner], range(10_000), [])), "nested too deeply"),
    ],
)
def test_what_cannot_be_taken_apart(function, where):
    with pytest.raises(IdentityError, match=where):
        identity_of(function)
