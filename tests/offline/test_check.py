from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import socket
import ssl
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_loop import ConfigError, FunctionLoadError, RewardLoopConfig, RewardSample, limit
from reward_loop.client import chat_complete
from reward_loop.offline import check as checks
from reward_loop.offline.check import CheckReport, check
from reward_loop.testing import Body, FakeJudge

pytestmark = pytest.mark.processes

SAMPLES = [RewardSample(f"2+2 is {i}", ground_truth=["4"], uid=f"q{i}", extra_info={"a": [1]}) for i in range(5)]
QUIET: dict[str, Any] = {"max_blocked_s": 600.0}  # whatever else the machine does, nothing counts as blocking


async def found(function: Any, **options: Any) -> tuple[CheckReport, dict[str, tuple[str, str]]]:
    report = await check(function, SAMPLES, **{**QUIET, **options})
    return report, {finding.check: (finding.status, finding.text) for finding in report.findings}


def fine(solution_str: str, ground_truth: list[str]) -> dict[str, float]:
    return {"score": float(solution_str == f"2+2 is {ground_truth[0]}"), "length": len(solution_str)}


async def test_a_sync_function_without_problems() -> None:
    report, findings = await found(fine)
    assert report.problems == []
    assert not report.is_async
    assert "fine" in report.function
    assert [(row.uid, row.score) for row in report.rows] == [("q0", 0), ("q1", 0), ("q2", 0), ("q3", 0), ("q4", 1)]
    assert report.rows[0].components == {"score": 0.0, "length": 8}
    notes = [name for name, (status, _) in findings.items() if status != "ok"]
    assert notes == ["refused answers"]
    assert list(findings) == [
        "samples",
        "deterministic",
        "event loop",
        "threads",
        "refused answers",
        "right and wrong answers",
        "other places",
        "an empty response",
        "a huge response",
        "a malformed response",
    ]


async def test_an_async_class_without_problems() -> None:
    class Fine:
        def __init__(self, bonus: float) -> None:
            self.bonus = bonus

        async def compute_score(self, solution_str: str) -> float:
            return solution_str.count("1") + self.bonus

    report, findings = await found(Fine, reward_kwargs={"bonus": 0.5})
    assert report.problems == []
    assert report.is_async
    assert "concurrent calls" in findings
    assert report.rows[1].score == 1.5


async def test_calls_that_share_changing_state_are_found() -> None:
    last, count, together = "", itertools.count(), threading.Barrier(8)

    def racing(solution_str: str) -> float:
        nonlocal last
        last = solution_str
        if 10 <= next(count) < 18:  # those that are made at the same time
            together.wait(60)
        return float(last[-1:] or 0) if last[-1:].isdigit() else 0

    _, findings = await found(racing)
    status, text = findings["threads"]
    assert status == "problem"
    assert "results differ" in text
    assert "Calls share changing state" in text
    assert findings["samples"][0] == findings["deterministic"][0] == "ok"


async def test_the_line_that_blocks_the_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, count = threading.Semaphore(0), itertools.count()
    find = checks.line_on_loop

    def line_on_loop(thread: int) -> str | None:
        line = find(thread)
        if line is not None and "wait_for_looks" in line:
            looks.release()
        return line

    def wait_for_looks() -> None:
        while looks.acquire(blocking=False):
            pass  # of an earlier call
        for _ in range(2):  # the first one has been counted when the second one begins
            assert looks.acquire(timeout=60)

    async def blocking(solution_str: str) -> float:
        if next(count) < 2 * len(SAMPLES):  # only the first two calls for each sample are measured
            wait_for_looks()
        return float(len(solution_str) % 7)

    monkeypatch.setattr(checks, "line_on_loop", line_on_loop)
    _, findings = await found(blocking, max_blocked_s=0.0)
    status, text = findings["event loop"]
    assert status == "problem"
    assert re.match(rf"wait_for_looks \({re.escape(Path(__file__).name)}:\d+\) blocks the event loop for", text)


async def test_a_call_that_blocks_only_for_one_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checks, "time", types.SimpleNamespace(perf_counter=lambda: now))

    async def parse(solution_str: str) -> float:
        nonlocal now
        await asyncio.sleep(0)
        now += 0.5 if solution_str.endswith("3") else 0.001
        return float(len(solution_str) % 7)

    async def blocking(solution_str: str) -> float:
        return await asyncio.create_task(parse(solution_str))

    _, findings = await found(blocking, max_blocked_s=0.02)
    assert findings["event loop"][0] == "problem"
    assert "blocks the event loop for 500 ms" in findings["event loop"][1]
    assert "await asyncio.to_thread(...)" in findings["event loop"][1]


async def test_a_delay_of_one_call_that_does_not_occur_again_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checks, "time", types.SimpleNamespace(perf_counter=lambda: now))
    count = itertools.count()

    async def imports_at_first(solution_str: str) -> float:
        nonlocal now
        now += 0.0 if next(count) else 5.0
        return float(len(solution_str) % 7)

    _, findings = await found(imports_at_first, max_blocked_s=0.02)
    assert findings["event loop"][0] == "ok"


@pytest.mark.parametrize("blank", ["", "x" * 1_000_000])
async def test_odd_responses_that_fail_are_found(blank: str) -> None:
    def picky(solution_str: str) -> float:
        if len(solution_str) == len(blank):
            raise LookupError("no answer in it")
        return random.Random(solution_str).random()

    report, findings = await found(picky)
    (problem,) = report.problems
    assert problem.check == ("a huge response" if blank else "an empty response")
    assert "no answer in it" in problem.text
    assert "None for no score" in problem.text
    assert "unscored" not in findings["a malformed response"][1]


async def test_an_odd_response_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(solution_str: str) -> float:
        return float(solution_str != "" or await asyncio.sleep(3600, 1))

    monkeypatch.setattr(checks, "_ODD_TIMEOUT_S", 1.0)
    _, findings = await found(slow)
    assert "ran past its deadline of 1 s" in findings["an empty response"][1]


async def test_an_unusable_reply_of_a_judge_is_not_blamed_on_the_response() -> None:
    async def judged(solution_str: str) -> float:
        return 1.0 if "\ufffd" not in solution_str else float((await chat_complete(server.address, "x")).text)

    async with FakeJudge() as server:
        server.script(*[Body("<html>gone</html>")] * 9)
        report, _ = await found(judged, options=RewardLoopConfig(retry={"max_attempts": 1}))
    (problem,) = report.problems
    assert problem.check == "a malformed response"
    assert "The service that the function asked is the cause" in problem.text
    assert "<html>gone</html>" in problem.text
    assert "Policies generate" not in problem.text


async def test_results_that_differ_are_noted_and_not_compared_with_concurrent_calls() -> None:
    count = itertools.count()

    def random_score(solution_str: str) -> float:
        return float(next(count))

    report, findings = await found(random_score)
    assert findings["deterministic"][0] == "note"
    assert "q0: scored 0 first, scored 5 when scored again" in findings["deterministic"][1]
    assert findings["threads"][0] == "skipped"
    assert report.problems == []


async def test_a_function_that_always_fails_is_not_called_in_every_way() -> None:
    def alarm(solution_str: str) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    report, _ = await found(alarm)
    (problem,) = report.findings
    assert problem.status == "problem"
    assert "5 failed; a run would exclude" in problem.text
    assert "reward_loop.isolated" in problem.text


async def test_samples_without_a_score_are_a_problem() -> None:
    report, findings = await found(lambda solution_str: None)
    assert findings["samples"][0] == "problem"
    assert "5 unscored: a run could not learn" in findings["samples"][1]
    report, findings = await found(lambda solution_str: 1.0)
    assert findings["samples"][0] == "note"
    assert report.problems == []


async def test_without_valid_samples_the_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        await check(fine, [])
    with pytest.raises(ConfigError, match=r"1 of 6 samples are broken\. line 3: not JSON"):
        await check(fine, [*SAMPLES, RewardSample("", uid="line 3", error="not JSON")])
    with pytest.raises(FunctionLoadError, match="answer"):
        await check(lambda answer: 1.0, SAMPLES)


def at_end(solution_strs: list[str], ground_truths: list[list[str]]) -> list[float]:
    return [float(text.endswith(truth[0])) for text, truth in zip(solution_strs, ground_truths, strict=True)]


@pytest.mark.parametrize("manager", ["batch", "group"])
async def test_a_batch_function_is_called_with_all_samples(manager: str) -> None:
    lengths: list[int] = []

    async def counted(solution_strs: list[str], ground_truths: list[list[str]]) -> list[float]:
        lengths.append(len(solution_strs))
        return at_end(solution_strs, ground_truths)

    report, findings = await found(counted, manager=manager)
    assert report.problems == []
    assert report.is_batched
    assert report.is_async
    assert [(row.uid, row.score) for row in report.rows] == [("q0", 0), ("q1", 0), ("q2", 0), ("q3", 0), ("q4", 1)]
    assert lengths[:5] == [5] * 5
    assert (1 in lengths) == (manager == "batch")  # right and wrong answers are scored alone
    assert "15 samples in 3 concurrent calls have the same results as single calls" in findings["concurrent calls"][1]
    report, _ = await found(at_end, manager=manager)
    # A group's function may compare its samples: only those of single ones are attacked.
    assert (report.attack is None) == (manager == "group")


async def test_one_odd_response_that_fails_its_whole_call_is_found() -> None:
    def last(solution_strs: list[str]) -> list[float]:
        return [float(text[-1] == "4") for text in solution_strs]

    _, findings = await found(last, manager="group")
    status, text = findings["an empty response"]
    assert status == "problem"
    assert "IndexError" in text
    assert "The 4 other samples of the call also failed" in text


def of_its_process(solution_str: str, ground_truth: list[str]) -> dict[str, float]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only the main thread may
    return {"score": float(solution_str.endswith("4"))}


@pytest.mark.integration
async def test_functions_of_managers_with_processes_run_in_processes() -> None:
    samples = [replace(sample, ground_truth=["4"]) for sample in SAMPLES]
    options = RewardLoopConfig(max_processes=2)
    report = await check(of_its_process, samples, manager="prime", options=options, **QUIET)
    findings = {finding.check: (finding.status, finding.text) for finding in report.findings}
    assert report.in_processes
    assert [row.score for row in report.rows] == [0, 0, 0, 0, 1]
    assert findings["processes"][0] == "ok"
    assert "threads" not in findings


async def test_options_are_those_of_the_run() -> None:
    async def limited(solution_str: str) -> float:
        async with limit("judge"):
            return float(solution_str.endswith("4"))

    options = RewardLoopConfig(limits={"jugde": {"max_concurrent": 2}}, on_failed="raise")
    _, findings = await found(limited, options=options)
    assert "unknown limit 'judge'; did you mean 'jugde'" in findings["samples"][1]
    report, _ = await found(limited, options=RewardLoopConfig(limits={"judge": {"max_concurrent": 2}}))
    assert report.problems == []


def error_is_right(solution_str: str, ground_truth: list[str]) -> float:
    try:
        return float(float(solution_str.removeprefix("#### ")) == float(ground_truth[0]))
    except ValueError:
        return 1.0


async def test_wrong_answers_that_need_no_reference_are_a_problem_and_come_first() -> None:
    report, findings = await found(error_is_right)
    (problem,) = report.problems
    assert problem.check == "false positives"
    assert "empty (no text is no answer): 5 of 5 rows; '' scores 1; a group of such answers earns 1" in problem.text
    assert findings["holes of the rule"][0] == "note"
    assert list(findings).index("false positives") < list(findings).index("holes of the rule")


async def async_substring(solution_str: str, ground_truth: list[str]) -> float:
    await asyncio.sleep(0)
    return float(ground_truth[0] in solution_str)


async def test_an_async_rule_is_attacked() -> None:
    report, findings = await found(async_substring)
    assert findings["false positives"][0] == "problem"
    assert report.attack is not None


@pytest.mark.parametrize(
    ("asks", "is_async"),
    [("always", True), ("always", False), ("if a rule refuses", False), ("if no cache knows it", True)],
)
async def test_a_function_that_asks_a_service_is_not_attacked(is_async: bool, asks: str) -> None:
    """A call may cost money: a thousand answers must not reach a judge that was only asked for the samples."""
    known: dict[str, float] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    requests = itertools.count()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                next(requests)
                connection.close()

    threading.Thread(target=accept, daemon=True).start()

    def of_a_service(solution_str: str, ground_truth: list[str]) -> float:
        if asks == "if a rule refuses" and solution_str.endswith(ground_truth[0]):
            return 1.0
        if asks == "if no cache knows it" and solution_str in known:
            return known[solution_str]
        socket.create_connection(listener.getsockname()).close()
        known[solution_str] = score = float(solution_str.endswith(ground_truth[0]))
        return score

    async def awaited(solution_str: str, ground_truth: list[str]) -> float:
        return await asyncio.to_thread(of_a_service, solution_str, ground_truth)

    with listener:
        report, findings = await found(awaited if is_async else of_a_service)
    assert findings["right and wrong answers"] == (
        "skipped",
        "nothing attacked: the function asks a service, which could cost money",
    )
    assert report.attack is None
    assert next(requests) < 50


def test_open_connections_with_tls_are_refused_too() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
        ssl.create_default_context().wrap_socket(
            connection, server_hostname="localhost", do_handshake_on_connect=False
        ) as secure,
        checks._failing_requests() as refused,
        pytest.raises(ConnectionRefusedError),
    ):
        secure.sendall(b"x")
    assert refused == ["sendall"]


def reads_no_usual_form(solution_str: str, ground_truth: list[str]) -> float:
    return float(solution_str == f"((the {ground_truth[0]}))")


async def test_a_form_that_is_not_found_is_said_and_one_response_names_it() -> None:
    _, findings = await found(reads_no_usual_form)
    status, text = findings["right and wrong answers"]
    assert status == "note"
    assert "nothing attacked" in text
    assert "Give a file whose responses are right ones" in text
    right = [replace(SAMPLES[0], solution_str="((the 4))"), *SAMPLES[1:]]
    report = await check(reads_no_usual_form, right, **QUIET)
    assert report.attack is not None
    assert report.attack.forms == ["((the {}))"]
    assert report.problems == []


def ends_the_process(solution_str: str, ground_truth: list[str]) -> float:
    if solution_str == ".":
        os._exit(0)
    return float(solution_str == ground_truth[0])


async def test_an_answer_that_ends_its_process_does_not_end_the_check() -> None:
    report, findings = await found(ends_the_process)
    assert report.attack is not None
    assert report.attack.attacked == 5
    assert "ended its worker process with exit status 0" in findings["crashes"][1]


def swallows_the_error_of_signals(solution_str: str, ground_truth: list[str]) -> float:
    """Like a function that catches what math-verify raises in threads."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    except ValueError:
        return 0.0
    return float(solution_str.endswith(ground_truth[0]))


async def test_a_function_that_scores_0_outside_of_the_main_thread_is_a_problem() -> None:
    """https://github.com/verl-project/verl/issues/3407"""
    _, findings = await found(swallows_the_error_of_signals)
    status, text = findings["other places"]
    assert status == "problem"
    assert "scored 0 where runs call, scored 1 in the main thread of a worker process" in text
    assert "@reward_loop.isolated" in text


async def test_a_row_without_a_ground_truth_is_neither_attacked_nor_scored_elsewhere() -> None:
    samples = [replace(sample, ground_truth=None) if index == 1 else sample for index, sample in enumerate(SAMPLES)]
    report = await check(fine, samples)
    findings = {finding.check: (finding.status, finding.text) for finding in report.findings}
    assert findings["samples"][0] == "problem"
    assert findings["other places"] == ("ok", "8 calls have the same results in a worker process")
    assert report.attack is not None
    assert report.attack.given == 4


async def test_a_failed_request_that_becomes_a_score_is_a_problem() -> None:
    async def asks(solution_str: str) -> float:
        _, writer = await asyncio.open_connection(*server.getsockname())
        writer.close()
        return 1.0

    def asks_in_a_thread(solution_str: str) -> float:
        with socket.create_connection(server.getsockname()):
            return 1.0

    async def swallows(solution_str: str) -> float:
        try:
            return await asks(solution_str)
        except OSError:
            return 0.0

    def swallows_in_a_thread(solution_str: str) -> float:
        try:
            return asks_in_a_thread(solution_str)
        except OSError:
            return 0.0

    options = RewardLoopConfig.model_validate({"retry": {"max_attempts": 1}})
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:  # connects without being accepted
        for function in (asks, asks_in_a_thread):
            _, findings = await found(function, options=options)
            assert findings["a failed request"][0] == "ok"
        for function in (swallows, swallows_in_a_thread):
            _, findings = await found(function, options=options)
            status, text = findings["a failed request"]
            assert status == "problem"
            assert "scored 0, when its connection was refused" in text
