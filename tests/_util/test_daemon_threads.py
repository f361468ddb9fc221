import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from reward_loop._util.daemon_threads import DaemonThreads


async def test_no_more_than_the_limit_at_a_time():
    threads = DaemonThreads(2)
    running, peak, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def work():
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        both.wait(60)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(6)))
    assert peak == 2


async def test_an_abandoned_call_leaves_its_slot():
    threads, release, started = DaemonThreads(1), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang():
        loop.call_soon_threadsafe(started.set)
        release.wait()

    task = asyncio.create_task(threads.run(hang))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await threads.run(lambda: "free") == "free"
    release.set()


def test_one_object_serves_one_loop_after_the_other():
    threads = DaemonThreads(1)

    async def contend():
        return await asyncio.gather(*(threads.run(lambda: 1) for _ in range(3)))

    assert asyncio.run(contend()) == [1, 1, 1]
    assert asyncio.run(contend()) == [1, 1, 1]


@pytest.mark.processes
def test_a_forked_copy_has_threads_of_its_own():
    code = """
import asyncio, os
from reward_loop._util.daemon_threads import DaemonThreads

threads = DaemonThreads(1)
work = lambda: asyncio.run(threads.run(os.getpid))
assert work() == os.getpid()  # its thread waits for another call
if (pid := os.fork()) == 0:
    assert work() == os.getpid()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("fine")
"""
    # The copy writes to the same pipe: should it hang, it holds that open as well.
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as run:
        try:
            assert run.communicate(timeout=60)[0] == b"fine\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
