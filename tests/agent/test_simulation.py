import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop import ConfigError
from reward_loop.agent.schedule import MODES
from reward_loop.agent.simulation import Workload, enough_concurrency, parse_latency, run_mode

SMALL = Workload(
    batch=8, responses=2, judge=parse_latency("constant:4"), concurrency=8, generation=3, training=4, steps=5
)


def test_step_times_equal_those_computed_by_hand():
    # 16 samples of 4 s, 8 at a time, arriving every 3/16 s: the last of the first 8 starts at 1.5 s, and the last of
    # all when a judge is free, at 5.5 s. So half of the groups are ready at 5.5 s and all at 9.5 s. Two mini-batches
    # train 2 s each.
    load = replace(SMALL, mini_batches=2)
    assert run_mode(load, "baseline").step_seconds == 9.5 + 4
    assert run_mode(load, "mini-batch").step_seconds == 9.5 + 2
    # The judges never rest after the first sample's arrival: 5 x 8 s, and the last mini-batch after the last reward.
    assert run_mode(load, "off-policy").seconds == 1.5 + 5 * 8 + 4
    assert run_mode(load, "both").seconds == 1.5 + 5 * 8 + 2


def test_waiting_hidden_and_floor_by_hand():
    load = replace(SMALL, mini_batches=2)
    baseline, pipeline = run_mode(load, "baseline"), run_mode(load, "mini-batch")
    assert (baseline.waiting, baseline.floor) == (6.5, 12)
    assert (pipeline.waiting, pipeline.floor) == (4.5, 10)
    judged = 9.5 - 3 / 16
    assert baseline.hidden == pytest.approx(1 - 6.5 / judged)
    assert pipeline.hidden == pytest.approx(1 - 4.5 / judged)
    assert run_mode(load, "both").floor == 8
    assert run_mode(replace(load, concurrency=16), "both").floor == 7


def test_log_probabilities_run_while_judges_work():
    load = replace(SMALL, prepare=5, mini_batches=1)
    assert run_mode(load, "baseline").step_seconds == 9.5 + 5 + 4
    assert run_mode(load, "mini-batch").step_seconds == 9.5 + 4


workloads = st.builds(
    Workload,
    batch=st.integers(4, 12),
    responses=st.integers(1, 4),
    judge=st.sampled_from(["uniform:0:9", "constant:3", "exponential:2", "lognormal:2:1"]).map(parse_latency),
    concurrency=st.integers(1, 40),
    generation=st.floats(0, 20),
    training=st.floats(0, 20),
    prepare=st.floats(0, 5),
    mini_batches=st.integers(1, 4),
    steps=st.integers(1, 6),
    seed=st.integers(0, 5),
)


@settings(deadline=None)
@given(workloads, st.sampled_from(sorted(MODES)))
def test_no_step_is_shorter_than_its_floor(load, mode):
    run = run_mode(load, mode)
    assert run.step_seconds >= run.floor - 1e-6
    assert -1e-9 <= run.hidden <= 1 + 1e-9
    assert run.seconds == pytest.approx((load.gpu_seconds + run.waiting) * load.steps)


@settings(deadline=None)
@given(workloads, st.sampled_from(sorted(MODES)), st.integers(0, 30))
def test_more_concurrency_never_makes_it_longer(load, mode, more):
    longer = run_mode(load, mode).seconds
    assert run_mode(replace(load, concurrency=load.concurrency + more), mode).seconds <= longer + 1e-6


@settings(deadline=None)
@given(workloads)
def test_overlaps_never_make_it_longer(load):
    baseline, pipeline, off_policy, both = (run_mode(load, mode).seconds for mode in MODES)
    assert pipeline <= baseline + 1e-6
    assert both <= off_policy + 1e-6


def test_enough_concurrency_hides_the_judging():
    load = Workload(steps=5)
    enough = enough_concurrency(load)
    assert enough == 518
    assert run_mode(replace(load, concurrency=2 * enough), "both").over_floor < 0.1
    assert run_mode(load, "both").step_seconds > 1.5 * load.gpu_seconds
    assert enough_concurrency(replace(SMALL, generation=0, training=0)) == 16


def test_a_hundred_large_steps_are_quick():
    started = time.thread_time()  # which other processes and threads have no part in
    run_mode(Workload(), "both")
    assert time.thread_time() - started < 30


def test_seeds():
    load = replace(SMALL, judge=parse_latency("exponential:4"))
    assert run_mode(load, "both").seconds == run_mode(load, "both").seconds
    assert run_mode(load, "both").seconds != run_mode(replace(load, seed=1), "both").seconds


def test_invalid_workloads_are_refused():
    for wrong in (
        {"batch": 0},
        {"concurrency": 0},
        {"training": -1},
        {"generation": float("nan")},
        {"mini_batches": 9},
    ):
        with pytest.raises(ConfigError):
            replace(SMALL, **wrong)


@pytest.mark.parametrize(
    ("text", "mean"), [("uniform:1:40", 20.5), ("constant:2", 2), ("lognormal:3:0.8", 4.13), ("exponential:5", 5)]
)
def test_distributions_have_the_mean_they_say(text, mean):
    latency = parse_latency(text)
    rng = random.Random(1)
    assert latency.mean == pytest.approx(mean, rel=0.01)
    assert sum(latency.draw(rng) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)


def test_measured_latencies(tmp_path):
    file = tmp_path / "latencies.jsonl"
    rows = [1, 2.5, {"seconds": 3}, {"work_s": 4}, {"score": 1, "reward_seconds": 5}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    latency = parse_latency(f"file:{file}")
    assert latency.mean == 3.1
    assert {latency.draw(random.Random(i)) for i in range(60)} == {1, 2.5, 3, 4, 5}
    for broken in ("{}", "true", "-1", "x", "", "NaN", "Infinity", "1e300"):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=r"line 1|contains no"):
            parse_latency(f"file:{file}")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_latency("file:nowhere")


def test_latencies_of_a_file_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "latencies.txt"
    file.write_text("1.5\r\n2\r\n", encoding="utf-8-sig")
    assert parse_latency(f"file:{file}").mean == 1.75
    file.write_text(str(10**400))
    with pytest.raises(ConfigError, match="line 1: expected seconds"):
        parse_latency(f"file:{file}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "uniform", "uniform:2:1", "uniform:1", "constant:-1", "constant:1:2", "normal:1:2", "exponential:nan"),
        *("uniform:nan:1", "uniform:1:nan", "constant:inf", "constant:1e308", "lognormal:3:40", "lognormal:1:nan"),
    ],
)
def test_invalid_latency_distributions_are_refused(text):
    with pytest.raises(ConfigError, match="uniform:LOW:HIGH"):
        parse_latency(text)
