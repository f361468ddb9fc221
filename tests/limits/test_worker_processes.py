"""Limits inside functions that run in processes of their own."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time

import pytest

import reward_loop
from reward_loop import Outcome, RewardLoopConfig, RewardSample, RewardTimeoutError, ScoringFunction
from reward_loop.limits.call import Call, Deadlines
from reward_loop.limits.local import LocalLimits
from reward_loop.limits.worker_processes import ServedCall
from tests.clock import advance, until

pytestmark = pytest.mark.integration  # starts processes


def scoring(function, **options):
    config = RewardLoopConfig(isolation="process", **{"retry": {"max_attempts": 1}, "max_processes": 2, **options})
    scored = ScoringFunction(function, options=config)
    return scored, scored.limits


async def score(function, *texts):
    try:
        return await asyncio.gather(*(function(RewardSample(text)) for text in texts))
    finally:
        await asyncio.to_thread(function.close)


def judge(limits):
    return limits.snapshot()["limits"]["judge"]


def dies(solution_str):
    if solution_str == "fine":
        with reward_loop.limit("judge"):
            return 1
    with reward_loop.limit("judge"):
        if solution_str == "hang":
            threading.Event().wait()
        elif solution_str == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif solution_str == "abort":
            os.abort()
        elif solution_str == "child":  # which has a copy of the connection
            if os.fork() == 0:
                threading.Event().wait()
            os._exit(3)
        elif solution_str == "raise":
            raise ValueError
    return None


async def test_a_process_that_dies_gives_back_its_place():
    function, limits = scoring(dies, limits={"judge": {"max_concurrent": 1}}, timeout=600)
    hangs = asyncio.create_task(function(RewardSample("hang")))
    await until(lambda: judge(limits)["in_flight"] == 1)
    others = asyncio.create_task(score(function, "kill", "abort", "child", "raise", "fine"))
    await until(lambda: judge(limits)["waiting"] == 1)
    await advance(601)
    results = [await hangs, *await others]
    assert [result.outcome for result in results] == [Outcome.FAILED] * 5 + [Outcome.SCORED]
    assert [isinstance(result.exception, RewardTimeoutError) for result in results] == [True] + [False] * 5
    await until(lambda: judge(limits)["in_flight"] == judge(limits)["waiting"] == 0)


def waits():
    with reward_loop.limit("judge"):
        return 1


async def test_a_process_that_is_killed_while_it_waits_leaves_the_queue():
    function, limits = scoring(waits, limits={"judge": {"max_concurrent": 1}})
    place = await limits.acquire("judge")
    calls = [asyncio.create_task(function(RewardSample(text))) for text in "ab"]
    await until(lambda: judge(limits)["waiting"] == 2)
    calls[0].cancel()
    await until(lambda: judge(limits)["waiting"] == 1)
    place.leave()
    assert (await calls[1]).score == 1
    await asyncio.to_thread(function.close)


def waits_with_a_default_timeout():
    socket.setdefaulttimeout(0.01)
    return waits()


async def test_the_default_timeout_of_sockets_does_not_end_the_wait():
    function, limits = scoring(waits_with_a_default_timeout, limits={"judge": {"max_concurrent": 1}})
    place = await limits.acquire("judge")
    call = asyncio.create_task(function(RewardSample("a")))
    await until(lambda: judge(limits)["waiting"] == 1)
    await asyncio.wait([call], timeout=0.2)
    place.leave()
    result = await call
    assert (result.error, result.score) == (None, 1)
    await asyncio.to_thread(function.close)


async def test_the_limit_is_that_of_the_whole_job(serve):
    service, address = await serve(RewardLoopConfig(limits={"judge": {"max_concurrent": 2}}))
    function, limits = scoring(dies, job=address, timeout=60)
    place = await limits.acquire("judge")
    hangs = asyncio.create_task(function(RewardSample("hang")))
    await until(lambda: judge(service.limits)["in_flight"] == 2)
    waiting = asyncio.create_task(function(RewardSample("fine")))
    await until(lambda: judge(service.limits)["waiting"] == 1)
    hangs.cancel()
    assert (await waiting).score == 1
    place.leave()
    await until(lambda: judge(service.limits)["in_flight"] == 0)
    await asyncio.to_thread(function.close)


def alarmed(solution_str):
    def ring(*_):
        raise InterruptedError

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3 if solution_str == "rings" else 60)
        with reward_loop.limit("judge"):
            return 1
    except InterruptedError:
        return 0


async def test_an_alarm_while_it_waits_spoils_nothing():
    function, limits = scoring(alarmed, limits={"judge": {"max_concurrent": 1}}, max_processes=1)
    place = await limits.acquire("judge")
    assert (await function(RewardSample("rings"))).score == 0
    await until(lambda: judge(limits)["waiting"] == 0)
    place.leave()
    (result,) = await score(function, "b")
    assert result.score == 1


def test_a_function_that_is_deleted_leaves_the_file_descriptors_of_a_uvloop_alone():
    """An event loop of uvloop does not keep its servers alive: the garbage collector would close their sockets."""
    uvloop = pytest.importorskip("uvloop")

    async def run():
        results = []
        for _ in range(3):
            function, _ = scoring(waits, limits={"judge": {"max_concurrent": 2}})
            results += await score(function, "a", "b")
            del function
            gc.collect()
        return results

    assert [result.error for result in uvloop.run(run())] == [None] * 6


def in_threads():
    ended = []

    def one():
        with reward_loop.limit("judge"):
            time.sleep(0.02)
        ended.append(1)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(ended)


async def test_threads_of_a_function_wait_for_permits_at_the_same_time():
    function, limits = scoring(in_threads, limits={"judge": {"max_concurrent": 2}})
    assert [result.score for result in await score(function, "a", "b", "c")] == [4, 4, 4]
    assert judge(limits)["in_flight"] == judge(limits)["waiting"] == 0


def leaves_a_thread(solution_str):
    """Return while a thread of the function still waits for a permit."""
    if solution_str == "b":
        return 1
    waiting = threading.Event()

    def one():
        waiting.set()
        with contextlib.suppress(reward_loop.LimitError), reward_loop.limit("judge"):
            threading.Event().wait()

    threading.Thread(target=one, daemon=True).start()
    waiting.wait()
    with reward_loop.limit("free"):  # the request of the thread has been sent before
        return 1


async def test_a_thread_that_still_waits_when_its_function_ends_gets_no_permit():
    function, limits = scoring(
        leaves_a_thread, limits={"judge": {"max_concurrent": 1}, "free": {"max_concurrent": 1}}, max_processes=1
    )
    place = await limits.acquire("judge")
    assert (await function(RewardSample("a"))).score == 1
    assert judge(limits)["waiting"] == 0
    assert (await function(RewardSample("b"))).score == 1
    place.leave()
    assert judge(limits)["in_flight"] == 0
    await asyncio.to_thread(function.close)


def busy_alarms():
    """Request permits, and interrupt the main thread at another moment each time."""
    is_armed = False

    def ring(*_):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise InterruptedError

    signal.signal(signal.SIGALRM, ring)
    for attempt in range(200):
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-5 * attempt)
        try:
            is_armed = True
            with reward_loop.limit("judge") as lease:
                lease.used(tokens=1)
            is_armed = False
        except InterruptedError:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    with reward_loop.limit("judge"):
        return 1


async def test_alarms_damage_no_message():
    function, limits = scoring(busy_alarms, limits={"judge": {"max_concurrent": 1000}}, max_processes=1)
    result = await function(RewardSample("a"))
    assert (result.error, result.score) == (None, 1)
    assert judge(limits)["in_flight"] == 0
    await asyncio.to_thread(function.close)


def forks():
    """Use a limit in a process that the function forks; return the exit status of that process."""
    if (pid := os.fork()) == 0:
        with reward_loop.limit("judge"):
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_a_process_that_the_function_forks_is_outside():
    function, limits = scoring(forks, limits={"judge": {"max_concurrent": 1}})
    place = await limits.acquire("judge")
    assert (await function(RewardSample("a"))).score == 7
    place.leave()
    await asyncio.to_thread(function.close)


async def test_a_permit_that_is_granted_as_its_request_is_withdrawn_is_free_again():
    limits = LocalLimits(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}))
    call, answers = Call(limits), []
    served = ServedCall(call, Deadlines(call.loop))
    place = await limits.acquire("judge")
    served.told(("request", 1, "judge", 0), lambda *answer: answers.append(answer))
    await until(lambda: judge(limits)["waiting"] == 1)
    place.leave()
    await asyncio.sleep(0)  # the request is granted, and its task has not continued yet
    served.told(("leave", 1, None, None), lambda *answer: answers.append(answer))
    await until(lambda: judge(limits)["in_flight"] == 0)
    assert answers == []
    served.told(("request", 2, "judge", 0), lambda *answer: answers.append(answer))
    served.close()  # before the request's task has begun
    await asyncio.sleep(0.01)
    call.end(abandoned=True)
    assert (answers, judge(limits)["in_flight"]) == ([], 0)
    limits.close()


def forks_while_it_holds():
    """Fork within a permit: the copy leaves the block, too. Return whether the permit is still held then."""
    with reward_loop.limit("judge"):
        if (pid := os.fork()) == 0:
            return None  # the copy ends when the function returns
        os.waitpid(pid, 0)
        started = time.monotonic()
        with reward_loop.limit("free"):  # all earlier messages have been handled
            time.sleep(0.1)
    return {"score": 1, "started": started, "ended": time.monotonic()}


async def test_a_forked_copy_of_a_worker_does_not_end_the_workers_permit():
    function, limits = scoring(
        forks_while_it_holds, limits={"judge": {"max_concurrent": 1}, "free": {"max_concurrent": 9}}, max_processes=2
    )
    results = await score(function, "a", "b")
    assert [result.error for result in results] == [None, None]
    first, second = sorted((result.extra_info["started"], result.extra_info["ended"]) for result in results)
    assert first[1] <= second[0]
    assert judge(limits)["in_flight"] == 0
