"""Equal calls of several workers of a job: those that are made, and those that get the result of another one.

Each `ScoringFunction` has its own connection to the service, as a worker process has.
"""

import asyncio
import signal
import sys

import pytest

from reward_loop import Outcome, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.records import ActiveSample
from reward_loop.scoring import load_function
from tests.clock import advance, until

SAMPLE = RewardSample("4", uid="u1")


class Judge:
    """A judge that answers when its gate is open."""

    def __init__(self, answer=1.0, calls=None):
        self.answer = answer
        self.calls = [] if calls is None else calls
        self.gate = asyncio.Event()

    async def compute_score(self, solution_str):
        self.calls.append(solution_str)
        await self.gate.wait()
        return self.answer


def worker(address, judge, path=None, version="1", **options):
    cache = {"enabled": True, "path": path and str(path), "version": version}
    retry = {"max_attempts": 1}
    return ScoringFunction(judge, options=RewardLoopConfig(job=address, cache=cache, retry=retry, **options))


async def scored(function, active, sample=SAMPLE):
    with active:
        return await function(sample)


async def start(function, sample=SAMPLE):
    """Start to score; return once the call is made, or waits for an equal one, with its task and active sample."""
    active = ActiveSample(sample, "judge")
    task = asyncio.create_task(scored(function, active, sample))
    await until(lambda: "an equal call" in active.waits())
    await function.limits.status()  # the service has received the request
    return task, active


@pytest.fixture
async def job(serve):
    """Yield a function that makes workers of a job."""
    service, address = await serve(RewardLoopConfig())
    made = []

    def make(*given, **options):
        made.append(worker(address, *given, **options))
        return made[-1]

    make.service = service
    yield make
    for function in made:
        function.close()


async def test_one_call_of_several_workers_is_made(job):
    first, second = Judge({"score": 0.5, "why": "half ½"}), Judge()
    leader, active = await start(job(first))
    other = job(second)
    followers = [await start(other) for _ in range(2)]
    first.gate.set()
    result = await leader
    assert (result.score, result.attempts, active.merged) == (0.5, 1, 0)
    for task, active in followers:
        result = await task
        assert (result.score, result.extra_info, result.attempts) == (0.5, {"score": 0.5, "why": "half ½"}, 0)
        assert (active.merged, active.cached) == (1, 0)
    assert (first.calls, second.calls) == (["4"], [])


async def test_a_call_that_comes_while_the_score_is_being_stored_is_not_made_again(job, tmp_path):
    calls = []
    judges = [Judge(calls=calls) for _ in range(3)]
    functions = [job(judge, path=tmp_path / "scores.db") for judge in judges]
    for judge in judges:
        judge.gate.set()
    for text in map(str, range(20)):
        results = []
        for _ in range(20):
            for function in functions:
                results.append(asyncio.create_task(function(RewardSample(text))))
                await asyncio.sleep(0)
        assert {result.score for result in await asyncio.gather(*results)} == {1.0}
    assert sorted(calls, key=int) == list(map(str, range(20)))


@pytest.mark.parametrize(("answer", "outcome"), [("no score", Outcome.FAILED), (None, Outcome.UNSCORED)])
async def test_a_call_without_a_score_is_made_by_the_next_worker(answer, outcome, job):
    first, second, third = Judge(answer), Judge(0.5), Judge()
    leader, _ = await start(job(first))
    next_one, active = await start(job(second))
    last, _ = await start(job(third))
    first.gate.set()
    assert (await leader).outcome is outcome
    await until(lambda: second.calls)
    second.gate.set()
    assert ((await next_one).score, (await last).score, active.merged) == (0.5, 0.5, 0)
    assert third.calls == []


async def test_a_cancelled_call_is_made_by_the_next_worker(job):
    first, second, third = Judge(), Judge(0.5), Judge()
    leader, _ = await start(job(first))
    cancelled, _ = await start(job(third))
    next_one, _ = await start(job(second))
    cancelled.cancel()
    leader.cancel()
    await until(lambda: second.calls)
    second.gate.set()
    assert (await next_one).score == 0.5
    assert third.calls == []


async def test_a_result_that_json_cannot_represent_is_not_shared(job):
    first, second = Judge({"score": 1.0, "object": object()}), Judge(0.5)
    leader, _ = await start(job(first))
    next_one, _ = await start(job(second))
    first.gate.set()
    second.gate.set()
    assert ((await leader).score, (await next_one).score) == (1.0, 0.5)


async def test_an_equal_call_that_hangs_is_waited_for_as_long_as_a_call_may_take(job):
    first, second = Judge(), Judge(0.5)
    leader, _ = await start(job(first, timeout=None))
    waiting, active = await start(job(second, timeout=10))
    await advance(605)
    assert second.calls == []
    await advance(10)
    await until(lambda: second.calls)
    second.gate.set()
    assert ((await waiting).score, active.merged) == (0.5, 0)
    first.gate.set()
    assert (await leader).score == 1.0


async def test_without_the_service_each_worker_makes_its_calls(job):
    first, second = Judge(), Judge(0.5)
    leader, _ = await start(job(first))
    waiting, _ = await start(job(second))
    await job.service.disconnect()
    await until(lambda: second.calls)
    for judge in (first, second):
        judge.gate.set()
    assert ((await leader).score, (await waiting).score) == (1.0, 0.5)


class Constant:
    def __init__(self, score):
        self.score = score

    async def compute_score(self, solution_str):
        return self.score


@pytest.mark.parametrize(("version", "scores"), [("", [0.25, 0.75]), ("1", [0.25, 0.25])])
async def test_functions_with_a_state_that_the_key_lacks_are_merged_only_with_a_version(version, scores, job):
    constants = [Constant(0.25), Constant(0.75)]
    found = await asyncio.gather(*(job(constant, version=version)(SAMPLE) for constant in constants))
    assert [result.score for result in found] == scores


async def gated(solution_str):
    return await gated.judge.compute_score(solution_str)


async def test_functions_without_state_are_merged_without_a_version(job):
    gated.judge = Judge()
    leader, _ = await start(job(gated, version=""))
    follower, active = await start(job(gated, version=""))
    gated.judge.gate.set()
    await asyncio.gather(leader, follower)
    assert (gated.judge.calls, active.merged) == (["4"], 1)


async def test_a_result_that_is_too_large_to_send_is_read_from_the_file(job, tmp_path):
    first, second = Judge({"score": 1.0, "explanation": "x" * 2**20}), Judge(0.5)
    leader, _ = await start(job(first, path=tmp_path / "scores.db"))
    follower, active = await start(job(second, path=tmp_path / "scores.db"))
    first.gate.set()
    second.gate.set()
    assert ((await leader).score, (await follower).score, active.cached) == (1.0, 1.0, 1)
    assert second.calls == []


async def test_many_large_results_at_once_exceed_no_frame(job):
    first, second = Judge({"score": 1.0, "explanation": "x" * 1_000_000}), Judge()
    functions = job(first), job(second)
    samples = [RewardSample(str(i)) for i in range(20)]
    tasks = [(await start(function, sample))[0] for function in functions for sample in samples]
    first.gate.set()
    second.gate.set()
    assert {result.score for result in await asyncio.gather(*tasks)} == {1.0}
    assert second.calls == []


REWARD = """
import asyncio, sys
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.scoring import load_function

async def compute_score(solution_str):
    print("called", flush=True)
    return await answer()

async def answer():
    await asyncio.Event().wait()

async def main(file, address):
    config = RewardLoopConfig(job=address, cache={"enabled": True})
    function = ScoringFunction(load_function(file), options=config)
    task = asyncio.create_task(function(RewardSample("4", uid="u1")))
    for _ in range(10):
        await asyncio.sleep(0)
    await function.limits.status()
    print("started", flush=True)
    result = await task
    print(result.score, result.attempts, flush=True)

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


async def process(file, address):
    return await asyncio.create_subprocess_exec(
        sys.executable, str(file), str(file), address, stdout=asyncio.subprocess.PIPE
    )


async def lines(process, count):
    async with asyncio.timeout(60):
        return [(await process.stdout.readline()).decode().strip() for _ in range(count)]


async def test_processes(serve, tmp_path):
    """A worker process gets the result of this one; a killed one leaves its call to this one."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    _, address = await serve(RewardLoopConfig())
    function = ScoringFunction(load_function(str(file)), options=RewardLoopConfig(job=address, cache={"enabled": True}))
    judge = Judge(0.5)
    sys.modules[load_function(str(file)).__module__].answer = lambda: judge.compute_score("4")

    leader, _ = await start(function)
    other = await process(file, address)
    assert await lines(other, 1) == ["started"]
    judge.gate.set()
    assert (await leader).score == 0.5
    assert await lines(other, 1) == ["0.5 0"]
    await other.wait()

    other = await process(file, address)
    assert set(await lines(other, 2)) == {"started", "called"}
    follower, _ = await start(function)
    assert judge.calls == ["4"]
    other.send_signal(signal.SIGKILL)
    await other.wait()
    async with asyncio.timeout(60):
        assert (await follower).score == 0.5
    assert judge.calls == ["4", "4"]
    function.close()
