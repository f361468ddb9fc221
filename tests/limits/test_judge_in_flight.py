"""How many calls ask the run's own judge at a time, and how long they may take, in virtual time."""

import heapq
import itertools
import random

import pytest

from reward_loop.config import LimitConfig
from reward_loop.limits.limiter import FIRST, PATIENCE, SILENCE, AdaptiveConcurrency, Limiter
from reward_loop.limits.permit import MAX_PATIENCE, REWARD_MODEL
from tests.limits.asking import asking

TIMEOUT = 1.5
SAMPLES = 1024


class Batches:
    """An engine that computes one batch after the other; a batch takes longer the more sequences it has."""

    def __init__(self, size, seconds=0.25, per_sequence=0.004, slower=lambda now: 1.0):
        self.size, self.seconds, self.per_sequence, self.slower = size, seconds, per_sequence, slower
        self.waiting, self.running = [], 0

    def arrive(self, now, call):
        self.waiting.append(call)
        return self.next_batch(now)

    def end(self, now):
        self.running -= 1
        return self.next_batch(now)

    def next_batch(self, now):
        """Return the calls of the batch that begins now, with the seconds until each is answered."""
        if self.running or not self.waiting:
            return []
        batch, self.waiting = self.waiting[: self.size], self.waiting[self.size :]
        self.running = len(batch)
        longest = (self.seconds + self.per_sequence * len(batch)) * self.slower(now)
        return [(longest * length, call) for call, length in batch]


class Places(Batches):
    """An engine that begins a call as soon as one of its places is free."""

    def next_batch(self, now):
        begin, self.waiting = self.waiting[: self.size - self.running], self.waiting[self.size - self.running :]
        self.running += len(begin)
        return [(self.seconds * length * self.slower(now), call) for call, length in begin]


def play(engine, *, timeout=TIMEOUT, samples=SAMPLES, lengths=(1.0, 1.0), config=None, hangs=0.0, seed=0):
    """Judge samples as in a run: return the seconds, the number of failed calls, and the largest limit."""
    rng = random.Random(seed)
    limiter = Limiter(REWARD_MODEL, config or LimitConfig(adaptive=True, max_wait=None))
    now, order, events, failed, over, most = 0.0, itertools.count(), [], 0, 0, 0.0
    open_calls = {}  # call -> its start

    def after(seconds, what, call):
        heapq.heappush(events, (now + seconds, next(order), what, call))

    def begin(call):
        open_calls[call] = now
        after(timeout, "look", call)
        if rng.random() >= hangs:
            start(engine.arrive(now, (call, rng.uniform(*lengths))))

    def start(calls):
        for seconds, call in calls:
            after(seconds, "answer", call)

    for call in range(samples):
        limiter.enter(0.0, asking(0, "train", lambda call=call: begin(call)))
    limiter.advance(0.0)
    while over < samples:
        now, _, what, call = heapq.heappop(events)
        most = max(most, limiter.max_in_flight)
        if what == "answer":
            if call in open_calls:
                over += 1
                limiter.leave(now, accepted=True, share=(now - open_calls.pop(call)) / timeout)
            start(engine.end(now))
        elif call in open_calls:
            left = open_calls[call] + timeout * limiter.patience - now
            if left > 1e-9:
                after(left, "look", call)
                continue
            over, failed = over + 1, failed + 1
            limiter.leave(now, share=(now - open_calls.pop(call)) / timeout)
        limiter.advance(now)
    return now, failed, most


ENGINES = {
    "one at a time": lambda **more: Batches(1, 0.1, 0.0, **more),
    "batches of 64": lambda **more: Batches(64, **more),
    "batches of 256, each longer than the deadline": lambda **more: Batches(256, 0.25, 0.008, **more),
    "256 places": lambda **more: Places(256, **more),
    "places without an end": lambda **more: Places(100_000, 0.8, **more),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("lengths", [(1.0, 1.0), (0.1, 1.0)], ids=["equal", "different"])
@pytest.mark.parametrize("seed", range(3))
def test_a_full_judge_fails_no_call(name, lengths, seed):
    seconds, failed, _ = play(ENGINES[name](), lengths=lengths, seed=seed)
    assert failed == 0
    # With a deadline that nobody meets, and without any limit, the judge works as fast as it can.
    best, _, _ = play(ENGINES[name](), timeout=1e9, lengths=lengths, config=LimitConfig(), seed=seed)
    assert seconds < 1.5 * best + 10 * TIMEOUT


def test_the_fixed_limit_failed_calls():
    fixed = LimitConfig(max_concurrent=512)
    assert play(ENGINES["batches of 256, each longer than the deadline"](), config=fixed)[1] > SAMPLES / 2


@pytest.mark.parametrize("name", ENGINES)
def test_a_judge_that_becomes_three_times_slower_fails_no_call(name):
    assert play(ENGINES[name](slower=lambda now: 3.0 if now > 2 else 1.0))[1] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_with_the_usual_deadline_the_judge_is_as_fast_as_without_a_limit(name):
    best, _, _ = play(ENGINES[name](), timeout=1e9, samples=8 * SAMPLES, config=LimitConfig())
    seconds, failed, _ = play(ENGINES[name](), timeout=300.0, samples=8 * SAMPLES)
    assert failed == 0
    slowest_start = 4 * 0.8  # the rounds before the judge is full
    assert seconds < 1.03 * best + slowest_start


def test_calls_that_hang_fail_and_hold_no_other_back():
    seconds, failed, most = play(ENGINES["256 places"](), samples=4 * SAMPLES, hangs=0.01)
    assert 0 < failed < 0.02 * 4 * SAMPLES
    assert most >= 256
    best, _, _ = play(ENGINES["256 places"](), timeout=1e9, samples=4 * SAMPLES, config=LimitConfig())
    assert seconds < best + 5 * PATIENCE * TIMEOUT


def test_while_a_judge_answers_nothing_few_calls_risk_their_deadlines():
    adaptive = AdaptiveConcurrency(initial=FIRST)
    for _ in range(1000):
        adaptive.answered(0.0, adaptive.calls, 0.01)
    assert adaptive.calls > 100
    for _ in range(SILENCE - 1):
        adaptive.expired()
    adaptive.answered(0.0, adaptive.calls, 0.01)  # one call hung, the judge did not
    adaptive.expired()
    assert adaptive.calls > 100
    for _ in range(SILENCE):
        adaptive.expired()
    assert adaptive.calls == FIRST
    assert adaptive.patience == 1


def test_patience_follows_the_slowest_of_the_latest_answers():
    adaptive = AdaptiveConcurrency(maximum=10, initial=10)
    assert adaptive.patience == 1
    adaptive.answered(0.0, 1, 0.9)
    assert adaptive.patience == 0.9 * PATIENCE
    for _ in range(25):  # also with few calls in flight, when the limit does not grow
        adaptive.answered(0.0, 1, 0.01)
    assert adaptive.patience == 1


def test_patience_ends():
    adaptive = AdaptiveConcurrency(maximum=10, initial=10)
    for _ in range(20):  # each call takes as long as the slowest one allowed
        adaptive.answered(0.0, 1, adaptive.patience)
    assert adaptive.patience == MAX_PATIENCE
