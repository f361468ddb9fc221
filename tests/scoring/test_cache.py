import asyncio
import contextlib
import copy
import dataclasses
import enum
import functools
import sqlite3
import subprocess
import sys
import threading
import time
import types
import uuid
from datetime import date, datetime
from datetime import time as time_of_day
from typing import Any

import numpy as np
import pytest

from reward_loop import ConfigError, Outcome, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.scoring import cache
from reward_loop.scoring.options import CacheConfig
from reward_loop.scoring.signature import resolve

SAMPLE = RewardSample("4", ground_truth="4", uid="u1")


def cached(function, path=None, version="1"):
    config = RewardLoopConfig(cache={"enabled": True, "path": path and str(path), "version": version})
    return ScoringFunction(function, options=config)


CIRCULAR = []
CIRCULAR.append(CIRCULAR)


class Judge:
    def __init__(self, answer=1.0):
        self.calls = 0
        self.answer = answer
        self.gate = asyncio.Event()
        self.gate.set()

    async def compute_score(self, solution_str, ground_truth, extra_info):
        self.calls += 1
        await self.gate.wait()
        return self.answer


async def test_equal_calls_in_flight_are_made_once():
    judge = Judge()
    judge.gate.clear()
    function = cached(judge)
    tasks = [asyncio.create_task(function(RewardSample("4", uid=str(i)))) for i in range(10)]
    other = asyncio.create_task(function(RewardSample("5")))
    await asyncio.sleep(0)
    judge.gate.set()
    assert [(await task).score for task in tasks] == [1.0] * 10
    await other
    assert judge.calls == 2
    await function(RewardSample("4"))
    assert judge.calls == 3


async def test_a_cancelled_call_does_not_cancel_merged_ones():
    judge = Judge()
    judge.gate.clear()
    function = cached(judge)
    first, second = (asyncio.create_task(function(SAMPLE)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    judge.gate.set()
    assert (await second).score == 1.0
    assert judge.calls == 1


async def test_a_failure_names_each_sample():
    function = cached(Judge("no score"))
    results = await asyncio.gather(*(function(RewardSample("4", uid=f"u{i}")) for i in range(2)))
    assert [result.error.partition(":")[0] for result in results] == ["sample u0", "sample u1"]


async def test_scores_are_kept_in_a_file(tmp_path):
    path = tmp_path / "folder" / "scores.db"
    first, second = (Judge({"score": 0.5, "why": "half"}) for _ in range(2))
    made = await cached(first, path)(SAMPLE)
    kept = await cached(second, path)(SAMPLE)
    assert (kept.score, kept.extra_info, kept.attempts) == (0.5, {"score": 0.5, "why": "half"}, 0)
    assert made.extra_info == kept.extra_info
    assert second.calls == 0
    # What the arguments do not say is part of the version.
    await cached(second, path, version="2")(SAMPLE)
    await cached(second, path)(RewardSample("4", ground_truth="5"))
    assert second.calls == 2


async def test_the_source_file_is_part_of_the_key(tmp_path, monkeypatch):
    file = tmp_path / "reward.py"
    for score in (1.0, 2.0):
        file.write_text(f"def compute_score(solution_str):\n    return {score}\n")
        module = types.ModuleType("reward_of_the_cache_test")
        module.__file__ = str(file)
        exec(file.read_text(), module.__dict__)  # as loading it anew in another run would
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert (await cached(module.compute_score, tmp_path / "scores.db")(SAMPLE)).score == score


class Tokenizer:
    """Is not to be written down, as those of transformers are not."""

    def __init__(self, name_or_path):
        self.name_or_path = name_or_path


async def test_the_reward_model_is_part_of_the_key_and_its_address_is_not(tmp_path):
    calls = []

    async def judge(solution_str, reward_router_address, reward_model_tokenizer):
        calls.append((reward_router_address, reward_model_tokenizer.name_or_path))
        return 1.0

    function = cached(judge, tmp_path / "scores.db")
    for address, model in (("a:1", "small"), ("b:2", "small"), ("b:2", "large")):
        await function(SAMPLE, reward_router_address=address, reward_model_tokenizer=Tokenizer(model))
    assert calls == [("a:1", "small"), ("b:2", "large")]


class Colour(enum.Enum):
    RED = "red"


class Rank(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: Any


@dataclasses.dataclass
class Unset:
    x: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Place:
    x: Any


ID = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: "a"}, {"1": "a"}),
        ({None: "a"}, {"null": "a"}),
        ({True: "a"}, {"true": "a"}),
        ({1.0: "a"}, {"1.0": "a"}),
        ({1.0: "a"}, {1: "a", "1": "b"}),
        ({date(2020, 1, 1): "a"}, {"2020-01-01": "a"}),
        ({(1, 2): "a"}, {"(1, 2)": "a"}),
        (date(2020, 1, 1), "2020-01-01"),
        (date(2020, 1, 1), datetime(2020, 1, 1)),
        (datetime(2020, 1, 1), "2020-01-01T00:00:00"),
        (time_of_day(1), "01:00:00"),
        (ID, str(ID)),
        (Colour.RED, "red"),
        (Colour.RED, Rank.RED),
        (Point(1), {"x": 1}),
        (Point(1), Place(1)),
        (Point({1: 2}), Point({"1": 2})),
        ((1, 2), [1, 2]),
        ([(1,), 2], [[1], 2]),
        ((1, 2), ["tuple", 1, 2]),
        ({"a": (1, {2: 3})}, ["dict", ["a", ["tuple", 1, ["dict", [2, 3]]]]]),
        (1, True),
        (1, "1"),
        (np.array([1, 2]), [1, 2]),
        (np.array([1, 2]), np.array([1.0, 2.0])),
        (np.zeros((0, 2)), np.zeros((0, 3))),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        (np.float32(0.1), 0.1),
        (np.array(["a"], dtype=object), np.array(["a"])),
    ],
)
async def test_calls_that_are_not_equal_are_not_merged(one, other):
    judge = Judge()
    function = cached(judge)
    values = [one, copy.deepcopy(one), other, copy.deepcopy(other)]
    await asyncio.gather(*(function(RewardSample("4", extra_info={"value": value})) for value in values))
    assert judge.calls == 2


def test_bound_arguments_that_are_not_equal_are_other_functions():
    def key(value):
        function = functools.partial(times, factor=value)
        return cache.Cache(CacheConfig(enabled=True), resolve(function)).key({"solution_str": "4"})

    assert key({"a": 1, 1: 2}) == key({1: 2, "a": 1})
    assert len({key(value) for value in ({1: "a"}, {"1": "a"}, (1,), [1], date(2020, 1, 1), "2020-01-01")}) == 6


def test_an_argument_that_is_no_json_value_does_not_change_the_key_of_another_one():
    def key(**arguments):
        return cache.Cache(CacheConfig(enabled=True), resolve(times)).key(arguments)

    assert key(a=(1,), b=["tuple", 1]) != key(a=["tuple", 1], b=(1,))
    assert key(a=(1,), b=2) == key(b=2, a=(1,)) != key(a=(1,), c=2)


async def test_the_order_of_items_is_not_part_of_the_key():
    judge = Judge()
    function = cached(judge)
    for info in ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: {2: 3, "x": 4}, "y": 5}, {"y": 5, 1: {"x": 4, 2: 3}}):
        judge.calls = 0
        await asyncio.gather(*(function(RewardSample("4", extra_info=one)) for one in info))
        assert judge.calls == 1


@pytest.mark.parametrize("answer", [None, "no score", {"score": 1, "tuple": (1,)}])
async def test_failures_missing_scores_and_inexact_results_are_not_cached(tmp_path, answer):
    path = tmp_path / "scores.db"
    for judge in (Judge(answer), Judge(answer)):
        await cached(judge, path)(SAMPLE)
        assert judge.calls == 1


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), {1: float("nan")}, CIRCULAR, Point, np.add, Unset()],
    ids=["nan", "inf", "object", "in a dict", "circular", "class", "function of numpy", "unset field"],
)
async def test_arguments_that_json_cannot_represent_are_not_cached(value):
    judge = Judge()
    function = cached(judge)
    none, other = RewardSample("4", ground_truth=[None]), RewardSample("4", ground_truth=[value])
    await asyncio.gather(*(function(sample) for sample in (none, none, other, other)))
    assert judge.calls == 3


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "scores.db").write_text("no database, but rather more than a few bytes of text" * 100)
    with pytest.raises(ConfigError, match=r"reward_loop.cache.path=.*scores.db"):
        cached(Judge(), tmp_path / "scores.db")


def test_a_file_that_another_process_is_making_is_waited_for(tmp_path, monkeypatch):
    with contextlib.closing(sqlite3.connect(tmp_path / "scores.db", isolation_level=None)) as other:
        other.execute("CREATE TABLE scores (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        other.execute("BEGIN IMMEDIATE")
        pauses = []

        def sleep(seconds):
            pauses.append(seconds)
            other.execute("ROLLBACK")

        monkeypatch.setattr(cache, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        cached(Judge(), tmp_path / "scores.db")
    assert len(pauses) == 1


async def test_a_call_that_comes_while_the_score_is_being_kept_is_not_made_again(tmp_path):
    judge = Judge()
    function = cached(judge, tmp_path / "scores.db")
    for text in map(str, range(20)):
        results = []
        for _ in range(20):  # they come turn by turn, before, while and after the first is made and kept
            results.append(asyncio.create_task(function(RewardSample(text))))
            await asyncio.sleep(0)
        await asyncio.gather(*results)
    assert judge.calls == 20


async def test_a_full_disk_costs_what_would_be_kept_and_no_sample(tmp_path, caplog):
    function = cached(Judge({"score": 1.0, "long": "x" * 5000}), tmp_path / "scores.db")
    function._cache._store._database.execute("PRAGMA max_page_count=2")
    for text in "abc":
        assert (await function(RewardSample(text))).outcome is Outcome.SCORED
    assert caplog.text.count("scores are not stored: ") == 1
    assert "database or disk is full" in caplog.text


async def test_a_spoilt_score_is_made_again(tmp_path):
    judge = Judge()
    function = cached(judge, tmp_path / "scores.db")
    await function(SAMPLE)
    with contextlib.closing(sqlite3.connect(tmp_path / "scores.db", isolation_level=None)) as other:
        other.execute("UPDATE scores SET value = ?", (b'[1.0, {"a',))
    assert [(await function(SAMPLE)).score, (await function(SAMPLE)).score] == [1.0, 1.0]
    assert judge.calls == 2


PROCESS = """
import asyncio, sys
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction

async def main():
    config = RewardLoopConfig(cache={"enabled": True, "path": sys.argv[1], "version": "1"})
    async def judge(solution_str): return int(solution_str)
    function = ScoringFunction(judge, options=config)
    results = await asyncio.gather(*(function(RewardSample(str(i))) for i in range(200)))
    assert [result.score for result in results] == list(range(200)), results

asyncio.run(main())
"""


def test_processes_share_the_file(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "scores.db")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


class Length:
    def __init__(self, factor=1):
        self.factor = factor

    def compute_score(self, solution_str):
        return times(solution_str, self.factor)


def times(solution_str, factor=3):
    return factor * len(solution_str)


async def test_bound_and_constructor_arguments_are_part_of_the_key(tmp_path):
    config = RewardLoopConfig(cache={"enabled": True, "path": str(tmp_path / "scores.db"), "version": "1"})
    for factor in (1, 2, 1):
        bound = ScoringFunction(functools.partial(times, factor=factor), options=config)
        made = ScoringFunction(Length, reward_kwargs={"factor": factor}, options=config)
        assert [(await function(RewardSample("four"))).score for function in (bound, made)] == [4 * factor] * 2


def test_a_file_needs_a_version(tmp_path):
    with pytest.raises(ConfigError, match=r"reward_loop\.cache\.path needs reward_loop\.cache\.version"):
        cached(times, tmp_path / "scores.db", version="")
    cached(times, version="")  # scores in memory are those of this function object


async def test_a_function_with_a_bound_argument_that_json_cannot_represent_is_not_stored(tmp_path):
    def judge(solution_str, lock):
        calls.append(solution_str)
        return 1.0

    calls = []
    locked = functools.partial(judge, lock=threading.Lock())
    with pytest.raises(ConfigError, match=r"judge .* cannot be stored, because one of its bound arguments"):
        cached(locked, tmp_path / "scores.db")
    in_memory = cached(locked)
    await asyncio.gather(in_memory(SAMPLE), in_memory(SAMPLE))
    assert calls == ["4"]
