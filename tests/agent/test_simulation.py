import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop import ConfigError
from reward_loop.agent.schedule import MODES
from reward_loop.agent.simulation import Workload, parse_latency, run_mode
from reward_loop.records import Records
from tests.records.rows import sample

SMALL = Workload(
    batch=8,
    responses=2,
    judge=parse_latency("constant:4"),
    concurrency=8,
    generation=3,
    training=4,
    mini_batches=2,
    steps=5,
)


def test_figures_equal_those_computed_by_hand():
    # 16 samples of 4 s, 8 at a time, arriving every 3/16 s: the last of the first 8 starts at 1.5 s, and the last of
    # all when a judge is free, at 5.5 s. So half of the groups are ready at 5.5 s and all at 9.5 s. Two mini-batches
    # train 2 s each.
    baseline, pipeline, off_policy, both = (run_mode(SMALL, mode) for mode in MODES)
    assert (baseline.step_s, baseline.floor_s, baseline.waiting_s) == (9.5 + 4, 12, 6.5)
    assert (pipeline.step_s, pipeline.floor_s, pipeline.waiting_s) == (9.5 + 2, 10, 4.5)
    # The judges never rest after the first sample's arrival: 5 x 8 s, and the last mini-batch after the last reward.
    assert (off_policy.step_s * 5, off_policy.floor_s) == (1.5 + 5 * 8 + 4, 8)
    assert (both.step_s * 5, both.floor_s) == (1.5 + 5 * 8 + 2, 8)
    assert run_mode(replace(SMALL, concurrency=16), "both").floor_s == 7


def test_log_probabilities_run_while_judges_work():
    load = replace(SMALL, prepare=5, mini_batches=1)
    assert run_mode(load, "baseline").step_s == 9.5 + 5 + 4
    assert run_mode(load, "mini-batch").step_s == 9.5 + 4


@settings(deadline=None)
@given(
    st.builds(
        Workload,
        batch=st.integers(4, 12),
        responses=st.integers(1, 4),
        judge=st.sampled_from(["uniform:0:9", "constant:3", "lognormal:2:1"]).map(parse_latency),
        concurrency=st.integers(1, 40),
        generation=st.floats(0, 20),
        training=st.floats(0, 20),
        prepare=st.floats(0, 5),
        mini_batches=st.integers(1, 4),
        steps=st.integers(1, 6),
    ),
    st.integers(0, 30),
)
def test_bounds_of_the_step_time(load, more):
    runs = [run_mode(load, mode) for mode in MODES]
    for run in runs:
        assert run.step_s >= run.floor_s - 1e-6
        assert run.step_s == pytest.approx(load.gpu_seconds + run.waiting_s)
        faster = run_mode(replace(load, concurrency=load.concurrency + more), run.mode)
        assert faster.step_s <= run.step_s + 1e-6
    baseline, pipeline, off_policy, both = (run.step_s for run in runs)
    assert pipeline <= baseline + 1e-6
    assert both <= off_policy + 1e-6


def test_enough_concurrency_hides_the_judging():
    load = Workload(steps=5)
    assert load.enough_concurrency == 518
    assert run_mode(replace(load, concurrency=2 * 518), "both").over_floor < 0.1
    assert run_mode(load, "both").step_s > 1.5 * load.gpu_seconds


def test_a_hundred_large_steps_are_quick():
    started = time.thread_time()  # which other processes and threads have no part in
    run_mode(Workload(), "both")
    assert time.thread_time() - started < 30


@pytest.mark.parametrize("wrong", [{"generation": float("nan")}, {"training": float("inf")}, {"mini_batches": 9}])
def test_invalid_workloads_are_refused(wrong):
    with pytest.raises(ConfigError):
        replace(SMALL, **wrong)


@pytest.mark.parametrize(("text", "mean"), [("uniform:1:40", 20.5), ("constant:2", 2), ("lognormal:3:0.8", 4.13)])
def test_distributions_have_the_mean_they_say(text, mean):
    latency = parse_latency(text)
    rng = random.Random(1)
    assert latency.mean == pytest.approx(mean, rel=0.01)
    assert sum(latency.draw(rng) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)


def test_measured_latencies(tmp_path):
    file = tmp_path / "latencies.jsonl"
    rows = [1, 2.5, {"work_s": 4}]
    file.write_text("\r\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8-sig")
    latency = parse_latency(f"file:{file}")
    assert latency.mean == 2.5
    assert {latency.draw(random.Random(i)) for i in range(60)} == {1, 2.5, 4}


def test_latencies_of_a_records_folder(tmp_path):
    writer = Records(tmp_path)
    for seconds in (1.0, 4.0, None):
        writer.write(sample("q_0", work_s=seconds))
    assert writer.flush()
    assert parse_latency(f"file:{tmp_path}").mean == 2.5
    with pytest.raises(ConfigError, match="no records"):
        parse_latency(f"file:{tmp_path.parent}")


@pytest.mark.parametrize("line", ["{}", "true", "null", "-1", "x", "NaN", "Infinity", "1e300", str(10**400)])
def test_measured_latencies_that_are_no_seconds_are_refused(line, tmp_path):
    (tmp_path / "latencies").write_text(line)
    with pytest.raises(ConfigError, match="line 1: expected seconds"):
        parse_latency(f"file:{tmp_path}/latencies")


def test_files_without_latencies_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="contains no latencies"):
        parse_latency(f"file:{tmp_path}/empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("nowhere", "bytes"):
        with pytest.raises(ConfigError, match="cannot be read"):
            parse_latency(f"file:{tmp_path}/{name}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "uniform", "uniform:2:1", "uniform:1", "constant:-1", "constant:1:2", "normal:1:2"),
        *("uniform:nan:1", "uniform:1:nan", "constant:inf", "constant:1e308", "lognormal:3:40", "lognormal:1:nan"),
    ],
)
def test_invalid_latency_distributions_are_refused(text):
    with pytest.raises(ConfigError, match="uniform:LOW:HIGH"):
        parse_latency(text)
