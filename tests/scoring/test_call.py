import asyncio
import functools
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from reward_loop import (
    BlockingRewardAgent,
    ConfigError,
    FunctionLoadError,
    InvalidScoreError,
    NaiveRewardLoopManager,
    Outcome,
    RewardFunctionError,
    RewardLoopConfig,
    RewardSample,
    RewardTimeoutError,
    ScoringFunction,
)
from tests.support.clock import advance, hastened

SAMPLE = RewardSample("4", data_source="math", ground_truth="4", extra_info={"level": 1}, uid="u7")


def plain(solution_str, ground_truth):
    return float(solution_str == ground_truth)


async def coroutine(solution_str, ground_truth):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def with_bonus(solution_str, ground_truth, bonus):
    return float(solution_str == ground_truth) + bonus


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Callable:
    def __call__(self, solution_str, ground_truth):
        return plain(solution_str, ground_truth)


class AsyncCallable:
    async def __call__(self, solution_str, ground_truth):
        return plain(solution_str, ground_truth)


class Judge:
    async def compute_score(self, solution_str, ground_truth):
        return plain(solution_str, ground_truth)

    def post_process_scores(self, scores):
        return [score - min(scores) for score in scores]


class SyncJudge:
    def compute_score(self, solution_str, ground_truth):
        return plain(solution_str, ground_truth)


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (plain, False),
        (coroutine, True),
        (functools.partial(with_bonus, bonus=0), False),
        (functools.partial(functools.partial(AsyncCallable())), True),
        (logged(plain), False),
        (logged(coroutine), False),
        (lambda **kwargs: coroutine(kwargs["solution_str"], kwargs["ground_truth"]), False),
        (Callable(), False),
        (AsyncCallable(), True),
        (Judge, True),
        (Judge(), True),
        (SyncJudge, False),
        (Judge().compute_score, True),
    ],
)
async def test_every_form_is_called(function, is_async):
    scoring = ScoringFunction(function)
    assert scoring.is_async is is_async
    result = await scoring(SAMPLE)
    assert (result.outcome, result.score, result.error) == (Outcome.SCORED, 1.0, None)
    assert result.work_s >= 0


async def test_bound_and_configured_arguments_are_not_overridden():
    def address(reward_router_address):
        return {"score": 1, "address": reward_router_address}

    bound = functools.partial(address, reward_router_address="mine:1")
    assert (await ScoringFunction(bound)(SAMPLE)).extra_info["address"] == "mine:1"
    configured = ScoringFunction(address, reward_kwargs={"reward_router_address": "mine:2"})
    assert (await configured(SAMPLE, reward_router_address="other:1")).extra_info["address"] == "mine:2"


async def test_reward_kwargs_reach_the_class_and_the_method():
    class Both:
        def __init__(self, alpha):
            self.alpha = alpha

        def compute_score(self, solution_str, beta):
            return self.alpha + beta

    assert (await ScoringFunction(Both, reward_kwargs={"alpha": 1, "beta": 2})(SAMPLE)).score == 3


class Fussy:
    def __init__(self, model):
        raise RuntimeError("no GPU")

    def compute_score(self, solution_str):
        return 0


class Quits:
    def __init__(self):
        sys.exit("OPENAI_API_KEY is not set")

    def compute_score(self):
        return 0


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (with_bonus, {}, "with_bonus .*requires bonus, which the reward loop does not provide.*reward_kwargs"),
        (
            with_bonus,
            {"bonus": 1, "bonsu": 1},
            "does not take the configured reward_kwargs bonsu; did you mean 'bonus'",
        ),
        (Fussy, {}, "class Fussy .*requires model"),
        (Fussy, {"model": 1}, "class Fussy .*cannot be instantiated: RuntimeError: no GPU"),
        (Quits, {}, "class Quits .*cannot be instantiated: SystemExit: OPENAI_API_KEY is not set"),
        (lambda solution_str, /: 0, {}, "takes solution_str by position only"),
        (3, {}, "cannot be called"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_once(function, kwargs, message):
    with pytest.raises(FunctionLoadError, match=message):
        ScoringFunction(function, reward_kwargs=kwargs)


def parse_answer(text):
    return int(text)


def raises(solution_str):
    return parse_answer("forty")


async def raises_async(solution_str):
    return parse_answer("forty")


def returns_raising_coroutine(solution_str):
    return raises_async(solution_str)


@pytest.mark.parametrize("function", [raises, raises_async, returns_raising_coroutine])
async def test_an_exception_is_a_failed_result_that_names_all(function):
    result = await ScoringFunction(function)(SAMPLE)
    assert (result.outcome, result.score) == (Outcome.FAILED, None)
    for part in (
        "sample u7 (data source 'math')",
        function.__name__,
        "test_call.py",
        "ValueError: invalid literal for int() with base 10: 'forty'",
        "in parse_answer",
        "return int(text)",
    ):
        assert part in result.error
    assert "scoring/" not in result.error.replace("tests/scoring/", "")
    assert isinstance(result.exception, RewardFunctionError)
    assert isinstance(result.exception.__cause__, ValueError)
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert isinstance(copy.exception, RewardFunctionError)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


class Exit(BaseException):
    """As those by which test and coroutine libraries leave."""


@pytest.mark.parametrize(
    "exception",
    [
        SystemExit(3),
        StopIteration(),
        asyncio.CancelledError(),
        TimeoutError("mine"),
        Unprintable(),
        Exit(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_no_exception_of_the_user_ends_more_than_its_sample(exception, is_async):
    def sync():
        raise exception

    async def coroutine():
        raise exception

    result = await hastened(ScoringFunction(coroutine if is_async else sync)(SAMPLE))
    assert result.outcome is Outcome.FAILED
    assert isinstance(result.exception, RewardFunctionError)


async def test_a_deadline_is_a_failed_result_and_not_retried():
    release, calls = threading.Event(), []

    async def hangs():
        calls.append("async")
        await asyncio.Event().wait()

    def blocks():
        calls.append("sync")
        release.wait()

    def returns_awaitable():
        calls.append("awaitable")
        return asyncio.Event().wait()

    for function in (hangs, blocks, returns_awaitable):
        result = await ScoringFunction(function, timeout=0.01)(SAMPLE)
        assert (result.outcome, type(result.exception)) == (Outcome.FAILED, RewardTimeoutError)
        assert result.error.startswith("sample u7 ")
        assert "ran past its deadline of 0.01 s" in result.error
    release.set()
    assert calls == ["async", "sync", "awaitable"]


async def test_a_function_that_swallows_its_cancellation_still_ends_at_its_deadline():
    release, swallowed = asyncio.Event(), 0

    async def stubborn():
        nonlocal swallowed
        while not release.is_set():
            try:
                await release.wait()
            except BaseException:
                swallowed += 1

    result = await ScoringFunction(stubborn, timeout=0.01)(SAMPLE)
    assert isinstance(result.exception, RewardTimeoutError)
    await asyncio.sleep(0)
    assert swallowed == 1
    release.set()


async def test_the_deadline_does_not_count_the_queue():
    # The first call holds the only thread; the second waits for it for longer than its deadline.
    started, release = threading.Event(), threading.Event()

    def waits():
        started.set()
        return release.wait(60)

    scoring = ScoringFunction(waits, timeout=None, max_threads=1)
    first = asyncio.create_task(scoring(SAMPLE))
    assert await asyncio.to_thread(started.wait, 60)
    scoring.timeout = 600
    second = asyncio.create_task(scoring(SAMPLE))
    await asyncio.sleep(0)
    await advance(700)
    release.set()
    assert [(await task).outcome for task in (first, second)] == [Outcome.SCORED] * 2
    assert (await second).queue_s > 600


async def test_cancellation_propagates():
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(ScoringFunction(waits)(SAMPLE))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended.wait()


@pytest.mark.processes
def test_a_hung_function_does_not_keep_the_interpreter():
    code = """
import asyncio, threading
from reward_loop import RewardSample, ScoringFunction
result = asyncio.run(ScoringFunction(lambda: threading.Event().wait(), timeout=0.05)(RewardSample("")))
print(result.outcome)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "failed", done.stderr


async def test_post_process_scores():
    scoring = ScoringFunction(Judge)
    assert scoring.has_post_process
    assert await scoring.post_process_scores([1.0, 3.0]) == [0.0, 2.0]
    halves = SyncJudge()
    halves.post_process_scores = lambda scores: np.array(scores) / 2
    assert await ScoringFunction(halves).post_process_scores([1.0, 2.0]) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("process", "error", "message"),
    [
        (lambda scores: scores[:-1], InvalidScoreError, r"must return a list of 2 scores.*got \[1.0\]"),
        (lambda scores: None, InvalidScoreError, "must return a list of 2 scores"),
        (lambda scores: [1.0, None], InvalidScoreError, "returned None 1 times"),
        (lambda scores: {2.0, 1.0}, InvalidScoreError, "must return a list of 2 scores"),
        (lambda scores: (1 / score for score in scores), InvalidScoreError, "must return a list of 2 scores"),
        (lambda scores: [float("nan")] * 2, InvalidScoreError, "not finite"),
        (lambda scores: 1 / 0, RewardFunctionError, "raised ZeroDivisionError"),
    ],
)
async def test_post_process_scores_that_goes_wrong(process, error, message):
    judge = SyncJudge()
    judge.post_process_scores = process
    with pytest.raises(error, match=message):
        await ScoringFunction(judge).post_process_scores([1.0, 2.0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("isolation", "starts", "error"),
    [
        ("thread", "threading.Thread.start", RuntimeError("can't start new thread")),
        ("process", "subprocess.Popen", OSError(24, "Too many open files")),
    ],
)
async def test_a_system_that_has_no_more_threads_or_processes(monkeypatch, isolation, starts, error):
    def refuse(*args, **kwargs):
        raise error

    function = ScoringFunction(plain, isolation=isolation)
    with monkeypatch.context() as patch:
        patch.setattr(starts, refuse)
        result = await function(SAMPLE)
    assert result.outcome is Outcome.FAILED
    assert result.error == (
        f"sample u7 (data source 'math'): plain (test_call.py) could not be started: {type(error).__name__}: {error}"
    )
    assert (await function(SAMPLE)).score == 1
    await asyncio.to_thread(function.close)


def test_an_option_given_beside_options_is_refused():
    with pytest.raises(ConfigError, match="ScoringFunction: timeout=None has no effect beside options"):
        ScoringFunction(lambda: 1.0, options=RewardLoopConfig(), timeout=None)


async def test_the_wait_for_a_limit_that_grants_nothing_is_measured():
    limits = {"default": {"max_concurrent": 1, "max_wait": 0.1}}
    scoring = ScoringFunction(plain, options=RewardLoopConfig(limits=limits))
    permit = await scoring.limits.acquire("default")
    refused = await scoring(SAMPLE)
    permit.leave()
    assert (refused.outcome, refused.attempts) == (Outcome.FAILED, 0)
    assert refused.wait_s >= 0.1


def test_a_function_that_needs_the_main_thread_is_told_to_run_in_processes():
    connection = sqlite3.connect(":memory:")

    def with_an_alarm(solution_str):
        try:
            signal.signal(signal.SIGALRM, lambda *_: None)
        except ValueError as error:
            raise ValueError("this library does not support threads") from error
        return 1.0

    async def with_a_connection(solution_str):
        return connection.execute("select 1").fetchone()[0]

    for function in (with_an_alarm, with_a_connection):
        with BlockingRewardAgent(NaiveRewardLoopManager(compute_score=function)) as agent:
            [reward] = agent.submit([RewardSample("4")]).result()
        error = reward["reward_extra_info"]["reward_error"]
        for part in (function.__name__, "a plain `def`", "isolation=process", "@reward_loop.isolated"):
            assert part in error.rpartition("\n")[2]
