import asyncio
import functools
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reward_loop import (
    FunctionLoadError,
    NaiveRewardLoopManager,
    Outcome,
    RewardCrashedError,
    RewardFunctionError,
    RewardLoopConfig,
    RewardSample,
    RewardTimeoutError,
    ScoringFunction,
    isolated,
    load_function,
)
from reward_loop._util.process import children
from reward_loop.processes import pool
from reward_loop.processes.outcome import RemoteError
from tests.processes.draws import draws
from tests.processes.misbehaving import CHANGES, MadeInTheTemplate, act, process_id
from tests.support.clock import advance
from tests.support.descriptors import left_open
from tests.support.servers import Watched

pytestmark = pytest.mark.integration  # starts processes


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait longer for a child that ends itself at its deadline: it first writes the stack of the function."""
    monkeypatch.setattr(pool, "_GRACE_SECONDS", 60.0)


def sample(does, **arguments):
    return RewardSample(does, extra_info=arguments, uid="u7")


@pytest.fixture(scope="module")
def one():
    """Yield a function that runs in one process, and is called again where a failure may pass."""
    retry = {"max_attempts": 4, "initial_wait": 0.01}
    options = RewardLoopConfig(isolation="process", max_processes=1, timeout=120, retry=retry)
    scoring = ScoringFunction(act, options=options)
    yield scoring
    scoring.close()


@pytest.fixture
def isolate():
    """Yield a function that makes a `ScoringFunction` in worker processes, closed at the end of the test."""
    made = []

    def new(function=act, **options):
        if "options" not in options:
            options = {"isolation": "process", "max_processes": 1, "timeout": 120, **options}
        made.append(ScoringFunction(function, **options))
        return made[-1]

    yield new
    for scoring in made:
        scoring.close()


@pytest.fixture
def fifo(tmp_path):
    """Return the path of a named pipe."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def timed_out(scoring, seconds, sample):
    timeout, scoring.timeout = scoring.timeout, seconds
    try:
        return await scoring(sample)
    finally:
        scoring.timeout = timeout


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid):
    """Wait until some process has ended, for a minute at most."""
    watched = Watched([pid])
    left = watched.left_after(60)
    watched.close()
    assert not left, f"process {pid} lives on"


@pytest.mark.parametrize(("calls_per_process", "processes"), [(1, [1] * 4), (3, [3, 1]), (None, [4])])
async def test_the_calls_of_a_process(isolate, calls_per_process, processes):
    options = RewardLoopConfig(isolation="process", max_processes=1, calls_per_process=calls_per_process)
    scoring = isolate(options=options)
    pids = [(await scoring(sample("process_id"))).score for _ in range(4)]
    assert os.getpid() not in pids
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == processes


async def test_a_call_does_not_see_what_another_has_changed(isolate):
    scoring = isolate()
    first = (await scoring(sample("state"))).extra_info["state"]
    for what in CHANGES:
        await scoring(sample("changes", what=what))  # some break their own process
        result = await scoring(sample("state"))
        assert (result.error, result.extra_info["state"]) == (None, first), what


async def test_random_numbers_are_those_of_the_sample():
    """In each run, whichever process scores it; forks of one process would all draw the same numbers."""

    async def drawn(processes):
        manager = NaiveRewardLoopManager({"isolation": "process", "max_processes": processes}, compute_score=draws)
        results = await asyncio.gather(*(manager.score(RewardSample("4", uid=uid)) for uid in "abc"))
        await asyncio.to_thread(manager.close)
        return [result.extra_info["drawn"] for result in results]

    first = await drawn(1)
    assert first == await drawn(2)
    assert len(set(first)) == 3


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
CONNECTION = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
"""


@pytest.mark.parametrize(("code", "left"), [(THREAD, "1 thread"), (CONNECTION, "a connection to ")])
async def test_what_a_fork_could_not_use_is_loaded_in_each_process(isolate, tmp_path, capfd, code, left):
    path = tmp_path / "loads.py"
    path.write_text(f"import os\n{code}def compute_score():\n    return os.getpid()\n")
    scoring = isolate(load_function(str(path)))
    pids = [(await scoring(RewardSample(""))).score for _ in range(3)]
    assert len(set(pids)) == 1
    assert f"loading compute_score (loads.py) leaves {left}" in capfd.readouterr().err


async def test_as_many_at_a_time_as_there_are_processes(isolate, fifo):
    scoring = isolate(max_processes=2)
    # Neither can end before the other is there.
    results = await asyncio.gather(*(scoring(sample(does, fifo=str(fifo))) for does in ("says", "hears")))
    assert [result.score for result in results] == [1.0, 1.0]


async def test_the_deadline_counts_from_the_start_of_the_function(isolate, fifo):
    # The first call holds the only process; the second waits for it for longer than its deadline.
    scoring = isolate(timeout=None)
    first = asyncio.create_task(scoring(sample("hears", fifo=str(fifo))))
    with await asyncio.to_thread(fifo.open, "w") as heard:  # it is open when the function has started
        second = asyncio.create_task(timed_out(scoring, 600, sample("works")))
        await asyncio.sleep(0)
        await advance(700)
        heard.write("hello")
    results = await asyncio.gather(first, second)
    assert [result.outcome for result in results] == [Outcome.SCORED] * 2
    assert results[1].queue_s > 600


async def test_a_call_past_its_deadline_is_killed_once_and_leaves_its_slot(one, tmp_path):
    path = tmp_path / "pids"
    result = await timed_out(one, 1, sample("hangs", path=str(path)))
    assert isinstance(result.exception, RewardTimeoutError)
    assert result.error.startswith("sample u7: act (misbehaving.py) ran past its deadline of 1 s, at\n")
    assert "in hangs" in result.error
    assert "reward_loop/processes" not in result.error
    (pid,) = path.read_text().split()  # it was not tried again
    assert not is_alive(pid)
    assert (await one(sample("works"))).score == 1.0


async def test_the_interpreters_lock_does_not_protect_it(one):
    result = await timed_out(one, 0.3, sample("holds_the_interpreter_lock"))
    assert isinstance(result.exception, RewardTimeoutError)
    assert (await one(sample("works"))).score == 1.0


async def test_processes_that_a_call_started_are_killed_with_its_worker(one, tmp_path):
    path = tmp_path / "pids"
    result = await one(sample("starts_others", path=str(path), then="exits_at_once"))
    assert isinstance(result.exception, RewardCrashedError)
    pids = path.read_text().split()
    assert len(pids) == 3
    assert not any(map(is_alive, pids))


async def test_cancellation_kills_the_call(one, fifo):
    task = asyncio.create_task(one(sample("tells_and_hangs", fifo=str(fifo))))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for_end, pid)
    assert (await one(sample("works"))).score == 1.0


CRASH = RewardCrashedError
FAILURE = RewardFunctionError


@pytest.mark.parametrize(
    ("does", "error", "message"),
    [
        ("exits_at_once", CRASH, "ended its worker process with exit status 3"),
        ("crashes", CRASH, "crashed: its worker process was killed by SIGSEGV, at\n"),
        ("kills_itself", CRASH, "crashed: its worker process was killed by SIGKILL, perhaps by the kernel because"),
        ("signals_its_group", CRASH, "crashed: its worker process was killed by SIGTERM"),
        ("overflows_the_stack", CRASH, "crashed: its worker process was killed by SIGSEGV, at\n"),
        ("returns_a_lock", FAILURE, "returned a lock, which cannot be sent back from a worker process (TypeError"),
    ],
)
async def test_a_call_without_a_result_fails_its_sample_only(one, does, error, message):
    result = await one(sample(does))
    assert isinstance(result.exception, error)
    assert f"sample u7: act (misbehaving.py) {message}" in result.error
    if message.endswith("at\n"):
        assert f"in {does}" in result.error
    assert (await one(sample("works"))).score == 1.0


@pytest.mark.parametrize(
    ("does", "message", "cause"),
    [
        ("raises", "raised ValueError: no number", ValueError),
        ("raises_what_cannot_be_made_again", "raised Picky: 7: picky", RemoteError),
        ("exits", "raised SystemExit: 3", SystemExit),
    ],
)
async def test_an_exception_is_a_failed_result(one, does, message, cause):
    result = await one(sample(does))
    assert isinstance(result.exception, RewardFunctionError)
    assert result.attempts == 1
    assert f"act (misbehaving.py) {message}" in result.error
    assert f"in {does}" in result.error
    found = result.exception.__cause__
    assert isinstance(found, cause)
    assert f"in {does}" in str(found if cause is RemoteError else found.__cause__)
    assert (await one(sample("works"))).score == 1.0


async def test_arguments_that_cannot_be_sent(one):
    error = (await one(sample("works", lock=threading.Lock()))).error
    assert "act (misbehaving.py) has arguments that cannot be sent to a worker process: TypeError: cannot" in error


async def test_the_default_timeout_of_sockets_does_not_apply_to_the_connection(isolate):
    """Graders set it for their own connections; it makes new sockets non-blocking."""
    scoring = isolate()
    socket.setdefaulttimeout(5)
    try:
        results = [await scoring(sample("process_id")) for _ in range(2)]
        large = await scoring(sample("takes", text="x" * 3_000_000))
    finally:
        socket.setdefaulttimeout(None)
    assert [result.error for result in (*results, large)] == [None] * 3


@pytest.mark.parametrize("does", ["prints_a_lot", "closes_its_streams", "comes_back_twice", "uses_an_alarm"])
async def test_output_closed_streams_and_alarms_do_not_affect_the_next_call(one, does):
    for _ in range(2):
        assert (await one(sample(does))).error is None
        assert (await one(sample("works"))).score == 1.0


@pytest.mark.parametrize("does", ["leaks", "starts_one_that_leaks"])
async def test_memory_has_a_bound(isolate, does):
    scoring = isolate(max_memory_mb=100)
    result = await scoring(sample(does))
    assert isinstance(result.exception, RewardCrashedError)
    assert "act (misbehaving.py) was killed: its worker process used " in result.error
    assert "more than max_memory_mb allows" in result.error
    assert (await scoring(sample("works"))).score == 1.0


def opened_and_closed(settled):
    scoring = ScoringFunction(act, isolation="process", max_processes=3, timeout=120)

    async def calls():
        settled()
        results = await asyncio.gather(*(scoring(sample("process_id")) for _ in range(20)))
        await timed_out(scoring, 0.1, sample("hangs"))
        pids = {int(result.score) for result in results}
        scoring.close()
        assert not any(map(is_alive, pids))
        # It starts again when it is needed.
        assert (await scoring(sample("process_id"))).score not in pids
        scoring.close()

    asyncio.run(calls())


def test_nothing_is_left_when_it_is_closed():
    assert left_open(opened_and_closed) == []


async def test_calls_that_run_or_wait_end_when_it_is_closed(isolate, fifo):
    before = set(children(os.getpid()))
    scoring = isolate()
    samples = sample("tells_and_hangs", fifo=str(fifo)), sample("works")  # the second one waits for the only process
    calls = [asyncio.create_task(scoring(one)) for one in samples]
    await asyncio.to_thread(fifo.read_text)
    await asyncio.to_thread(scoring.close)
    for result in await asyncio.gather(*calls):
        assert isinstance(result.exception, RewardCrashedError)
        assert result.error == "sample u7: act (misbehaving.py) was ended: it was closed before the call had ended"
    assert set(children(os.getpid())) <= before  # no process was started for the one that waited
    assert (await scoring(sample("works"))).score == 1.0


async def test_a_dead_fork_server_takes_its_workers_along_and_is_replaced(isolate, fifo):
    scoring = isolate()
    at_work = asyncio.create_task(scoring(sample("tells_and_hangs", fifo=str(fifo))))
    pid = int(await asyncio.to_thread(fifo.read_text))
    fork_server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(fork_server, 9)
    assert "lost its worker process" in (await at_work).error
    await asyncio.to_thread(wait_for_end, pid)
    assert (await scoring(sample("works"))).score == 1.0


def test_one_object_serves_one_loop_after_the_other(one):
    async def contend():
        return await asyncio.gather(*(one(sample("process_id")) for _ in range(3)))

    assert len({result.score for _ in range(2) for result in asyncio.run(contend())}) == 6


def run_script(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)


def test_workers_end_with_their_parent(tmp_path):
    code = """
import asyncio, os, signal, sys, threading
from reward_loop import RewardSample, ScoringFunction
from tests.processes.misbehaving import act

path = sys.argv[1]
hang = RewardSample("starts_others", extra_info={"path": path, "then": "hangs"})

async def main():
    scoring = ScoringFunction(act, isolation="process", timeout=None)
    task = asyncio.create_task(scoring(hang))
    while not os.path.exists(path) or len(open(path).read().split()) < 3:
        await asyncio.sleep(0.01)
    if (copy := os.fork()) == 0:
        signal.pause()  # such a copy must not keep them alive
    print(copy, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", code, pids], stdout=subprocess.PIPE, text=True) as script:
        copy = int(script.stdout.readline())
        try:
            assert script.wait(60) == -9
            for pid in pids.read_text().split():
                wait_for_end(int(pid))
        finally:
            os.kill(copy, 9)


def test_functions_of_a_script_that_has_no_main_guard(tmp_path):
    code = """
import asyncio, os
from dataclasses import dataclass
from reward_loop import RewardSample, ScoringFunction

@dataclass
class Detail:
    pid: int

def compute_score(extra_info):
    return {"score": 1.0, "detail": Detail(os.getpid()), "given": type(extra_info["detail"]).__name__}

scoring = ScoringFunction(compute_score, isolation="process")
result = asyncio.run(scoring(RewardSample("", extra_info={"detail": Detail(0)})))
assert result.extra_info["detail"]["pid"] != os.getpid()
print(result.score, result.extra_info["given"])
"""
    done = run_script(tmp_path, code)
    assert done.stdout == "1.0 Detail\n", done.stderr
    assert done.stderr == ""


def test_a_forked_copy_of_the_parent_has_processes_of_its_own(tmp_path):
    code = """
import asyncio, os, sys
from reward_loop import RewardSample, ScoringFunction
from tests.processes.misbehaving import act

scoring = ScoringFunction(act, isolation="process", max_processes=1)
score = lambda: asyncio.run(scoring(RewardSample("parent_id"))).score
first = score()
if os.fork() == 0:
    assert score() != first
    sys.exit(0)
assert os.wait()[1] == 0
assert score() == first
print("fine")
"""
    done = run_script(tmp_path, code)
    assert done.stdout == "fine\n", done.stderr


SOURCE = """
class Sad(Exception):
    pass

class Judge:
    def compute_score(self, solution_str):
        if solution_str == "sad":
            raise Sad("oh")
        return 1.0
"""


async def test_a_class_from_a_file(isolate, tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(SOURCE)
    scoring = isolate(load_function(str(path), "Judge"))
    assert (await scoring(RewardSample("4"))).score == 1.0
    result = await scoring(RewardSample("sad"))
    assert type(result.exception.__cause__) is load_function(str(path), "Sad")


async def test_the_object_of_a_class_is_made_in_the_template_alone(isolate, monkeypatch):
    def fails(self, bonus):
        raise AssertionError("made in this process")

    monkeypatch.setattr(MadeInTheTemplate, "__init__", fails)
    scoring = isolate(MadeInTheTemplate, reward_kwargs={"bonus": 3})
    info = (await scoring(RewardSample(""))).extra_info
    assert (info["score"], info["made_in"]) == (3, info["parent"])
    assert (await scoring(RewardSample(""))).extra_info["made_in"] == info["made_in"]
    monkeypatch.undo()
    assert await scoring.post_process_scores([1.0]) == [4.0]  # with an object of this process


def test_a_function_that_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(FunctionLoadError, match=r"cannot run in a worker process.*cannot pickle '_thread.lock'"):
        ScoringFunction(lambda: lock.locked(), isolation="process")


@pytest.mark.parametrize("calls_per_process", [1, None])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no weights')", "cannot be loaded in a worker process: ValueError: no weights"),
        ("raise SystemExit(3)", "cannot be loaded in a worker process: SystemExit: 3"),
        ("__import__('os')._exit(3)", "ended its worker process with exit status 3|lost its worker process"),
        ("__import__('time').sleep(60)", "was not loaded in a worker process within 1 s"),
    ],
)
def test_a_class_that_cannot_be_made_is_an_error_of_the_load(tmp_path, monkeypatch, calls_per_process, body, message):
    if "sleep" in body:
        monkeypatch.setattr(pool, "_START_SECONDS", 1)
        monkeypatch.setattr(pool, "_GRACE_SECONDS", 1)
    path = tmp_path / "scorer.py"
    path.write_text(
        f"class Scorer:\n    def __init__(self):\n        {body}\n    def compute_score(self):\n        return 1\n"
    )
    scorer = load_function(str(path), "Scorer")
    before = set(children(os.getpid()))
    with pytest.raises(FunctionLoadError, match=rf"Scorer.compute_score \(scorer.py\) ({message})"):
        ScoringFunction(scorer, isolation="process", calls_per_process=calls_per_process)
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize("calls_per_process", [1, None])
async def test_an_import_that_hangs_is_named_and_a_later_call_does_not_wait_for_it(
    isolate, tmp_path, monkeypatch, calls_per_process
):
    monkeypatch.setattr(pool, "_START_SECONDS", 3)
    monkeypatch.setattr(pool, "_GRACE_SECONDS", 5)  # to start the template on a busy machine
    path, pids = tmp_path / "hangs.py", tmp_path / "pids"
    path.write_text("def compute_score():\n    return 1\n")
    scoring = isolate(load_function(str(path)), max_processes=2, calls_per_process=calls_per_process)
    kept = path.read_text()
    sleep = f"subprocess.Popen(['sleep', '1000']) as sleep:\n    print(sleep.pid, file=open({str(pids)!r}, 'a'))\n"
    path.write_text(f"import subprocess\nwith {sleep}")
    for result in await asyncio.gather(*(scoring(sample("")) for _ in range(2))):
        lines = result.error.splitlines()
        assert lines[0] == "sample u7: compute_score (hangs.py) was not loaded in a worker process within 3 s, at"
        assert f'File "{path}", line 2 in <module>' in lines[-1]
    for pid in pids.read_text().split():
        await asyncio.to_thread(wait_for_end, int(pid))
    monkeypatch.setattr(pool, "_START_SECONDS", 300)
    path.write_text(kept)
    assert (await scoring(sample(""))).score == 1.0


async def test_a_process_that_could_not_load_the_function_gets_one_call_only(isolate, tmp_path):
    path = tmp_path / "at_first.py"
    path.write_text("def compute_score():\n    return 1\n")
    scoring = isolate(load_function(str(path)), calls_per_process=None)
    kept = path.read_text()
    path.write_text("raise MemoryError\n")
    assert "MemoryError" in (await scoring(RewardSample(""))).error
    path.write_text(kept)
    assert (await scoring(RewardSample(""))).score == 1.0


@isolated
def marked():
    return os.getpid()


@isolated
class Marked:
    def compute_score(self):
        return os.getpid()


@pytest.mark.parametrize("function", [Marked, Marked().compute_score, functools.partial(marked)])
async def test_a_marked_function_is_isolated_under_any_configuration(isolate, function):
    assert (await isolate(function, isolation="thread")(RewardSample(""))).score != os.getpid()


async def test_async_functions_stay_on_the_loop():
    async def compute_score():
        return os.getpid()

    assert (await ScoringFunction(compute_score, isolation="process")(RewardSample(""))).score == os.getpid()
    with pytest.raises(FunctionLoadError, match="is async, and only sync functions run in processes"):
        ScoringFunction(isolated(compute_score))


async def test_garbage_collection_ends_the_processes():
    scoring = ScoringFunction(process_id, isolation="process", max_processes=1)
    pid = (await scoring(RewardSample(""))).score
    del scoring
    gc.collect()
    assert not is_alive(pid)


async def test_errors_have_the_fields_of_their_message(one):
    result = await one(sample("raises_status", status=500, retry_after=0))
    error = result.exception
    assert (error.sample_uid, error.function, error.attempts, error.retry_after) == ("u7", one.name, 4, 0.0)
    assert str(error) == f"sample u7: {one.name} was called 4 times; the last call {error.problem}"
    assert error.problem.startswith("raised StatusError: the service says no\n")


async def test_a_crash_leaves_no_core(isolate):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        allowed = isolate(lambda: resource.getrlimit(resource.RLIMIT_CORE)[0])
        assert (await allowed(RewardSample(""))).score == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
