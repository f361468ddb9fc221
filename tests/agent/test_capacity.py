import math

import pytest

from reward_loop import ConfigError
from reward_loop.agent import capacity
from reward_loop.agent.capacity import Cost, Costs, PartLoad, RunSize, part_loads
from reward_loop.config import RewardModelConfig

COSTS = Costs(
    call=Cost(500, 100),
    worker=Cost(200, 50),
    request=Cost(300),
    tunnel=Cost(100),
    router=Cost(150, 25),
    limits=Cost(20),
    events=Cost(80),
)
SIZE = RunSize(nodes=10, node_rate=20, in_flight=4096, tokens=4000, agent_workers=4, workers=2)


def by_part(size: RunSize) -> dict[str, PartLoad]:
    return {load.part: load for load in part_loads(size, COSTS)}


def test_the_load_of_each_part_by_hand():
    # 10 nodes x 20 samples/s = 200 samples/s.
    assert {part: load.load for part, load in by_part(SIZE).items()} == pytest.approx(
        {
            "agent loop workers, calls": 200 * (500 + 4 * 100) * 1e-6,
            "reward workers": 200 * (200 + 4 * 50 + 300) * 1e-6,
            "router": 200 * (150 + 4 * 25) * 1e-6,
            "router, requests in flight": 4096,
            "tunnel to the router": 200 * 0.9 * 100 * 1e-6,  # nine of ten nodes
            "limiter service": 200 * 20 * 1e-6,
            "trainer, events": 200 * 80 * 1e-6,
        }
    )


def test_the_used_share_and_the_number_of_nodes_at_which_a_part_is_full():
    parts = by_part(SIZE)
    assert parts["agent loop workers, calls"].used == pytest.approx(0.18 / 4)
    assert parts["reward workers"].used == pytest.approx(0.14 / 2)
    assert parts["reward workers"].full_at(SIZE) == pytest.approx(10 / 0.07)
    assert parts["router, requests in flight"].used == 0.25
    assert parts["router, requests in flight"].full_at(SIZE) == 40


def test_the_most_used_part_is_the_first():
    assert [load.part for load in part_loads(SIZE, COSTS)][:2] == ["router, requests in flight", "reward workers"]
    assert part_loads(RunSize(nodes=1, in_flight=1, function_ms=50), COSTS)[0].part == "reward workers"


def test_the_cpu_time_of_the_function_loads_the_reward_workers():
    load = by_part(RunSize(nodes=10, node_rate=20, tokens=4000, function_ms=5, workers=1))["reward workers"]
    assert load.load == pytest.approx(0.14 + 200 * 0.005)
    assert load.remedy == "reward.num_workers=2 or more"  # 1.14 cores / 0.7


def test_several_requests_per_sample_load_router_and_workers():
    parts = by_part(RunSize(nodes=10, node_rate=20, tokens=4000, requests=3))
    assert parts["router"].load == pytest.approx(3 * 0.05)
    assert parts["reward workers"].load == pytest.approx(0.08 + 3 * 0.06)


def test_without_a_judge_there_is_no_load_on_router_and_tunnel():
    parts = by_part(RunSize(requests=0))
    assert not [part for part in parts if "router" in part]


def test_one_node_and_several_routers_have_no_tunnel():
    assert "tunnel to the router" in by_part(RunSize(nodes=2))
    assert "tunnel to the router" not in by_part(RunSize(nodes=1))
    assert "tunnel to the router" not in by_part(RunSize(nodes=64, routers=64))


def test_routers_share_the_requests():
    one, many = (by_part(RunSize(nodes=64, in_flight=20_000, routers=routers)) for routers in (1, 64))
    assert one["router"].used == pytest.approx(64 * many["router"].used)
    assert many["router, requests in flight"].used == pytest.approx(20_000 / 64 / 16_384)


def test_a_router_with_too_many_requests_in_flight_needs_a_higher_bound_or_more_routers():
    def remedy(in_flight: int) -> str:
        return by_part(RunSize(in_flight=in_flight))["router, requests in flight"].remedy

    assert remedy(20_000) == "reward_model.server.max_in_flight=20000"
    assert "reward-loop route" in remedy(30_000)  # more than one address has ports for


def test_the_bound_of_a_router_is_the_default_of_a_served_model():
    assert RewardModelConfig.model_fields["max_in_flight"].default == capacity.ROUTER_IN_FLIGHT


def test_the_time_in_flight_by_littles_law():
    assert RunSize(nodes=64, node_rate=16, in_flight=20_480).seconds_in_flight == 20


def test_measured_costs_are_given_for_each_part():
    loads = part_loads(RunSize())
    assert len(loads) == 7
    assert all(math.isfinite(load.full_at(RunSize())) for load in loads)
    assert "benchmarks.scale" in capacity.SOURCE


@pytest.mark.parametrize(
    "wrong", [{"nodes": 0}, {"node_rate": 0}, {"node_rate": float("nan")}, {"requests": -1}, {"function_ms": math.inf}]
)
def test_invalid_sizes_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RunSize(**wrong)
