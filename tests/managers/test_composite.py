import asyncio
import sys
import types

import pytest

from reward_loop import (
    BudgetSpentError,
    ConfigError,
    JobServiceError,
    RewardAgent,
    RewardFunctionError,
    RewardLoopConfig,
    RewardSample,
    ScoringError,
    ScoringFunction,
    TooManyFailuresError,
    limit,
)
from reward_loop.limits.server import LimitServer
from reward_loop.managers import CompositeRewardLoopManager
from tests.counting import Counting

SOURCE = """
import asyncio

calls = []

def form(solution_str):
    return float(solution_str.startswith("<"))

def accuracy(solution_str, ground_truth):
    return {"score": float(ground_truth in solution_str), "length": len(solution_str)}

class Judge:
    def __init__(self, scale=1.0):
        self.scale = scale

    async def compute_score(self, solution_str, reward_router_address):
        calls.append(solution_str)
        if "hang" in solution_str:
            await asyncio.Event().wait()
        if "down" in solution_str:
            raise ConnectionError("judge " + str(reward_router_address))
        return None if "?" in solution_str else (self.scale * len(solution_str), "prompt", "because")
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(SOURCE)
    return str(file)


@pytest.fixture
def calls(path):
    from reward_loop import load_function

    made = load_function(path, "form").__globals__["calls"]
    made.clear()
    return made


@pytest.fixture
def make(path):
    def make(components, compute_score=None, **options):
        config = {
            "reward_loop": {
                "components": {name: {"path": path, "name": name, **given} for name, given in components.items()},
                "retry": {"initial_wait": 0.001},
                **options,
            }
        }
        return CompositeRewardLoopManager(config, compute_score=compute_score, reward_router_address="h:1")

    return make


@pytest.fixture
def module(monkeypatch):
    """A module that can be imported as ``judges``; a test adds its functions."""
    made = types.ModuleType("judges")
    monkeypatch.setitem(sys.modules, "judges", made)
    return made


def run(manager, text, truth="4"):
    return manager.run_single(RewardSample(text, "math", truth, uid="u1"))


async def test_the_weighted_sum_and_each_by_name(make):
    manager = make({"form": {"weight": 0.5}, "accuracy": {}, "Judge": {"weight": 0.1, "reward_kwargs": {"scale": 2}}})
    reward = await run(manager, "<4>")
    assert reward["reward_score"] == pytest.approx(0.5 + 1 + 0.1 * 6)
    info = reward["reward_extra_info"]
    assert info["score"] == reward["reward_score"]
    assert (info["form"], info["accuracy"], info["Judge"]) == (1.0, 1.0, 6.0)
    assert (info["accuracy/length"], info["Judge/prompt"], info["Judge/explanation"]) == (3, "prompt", "because")
    assert info["Judge/outcome"] == info["reward_outcome"] == "scored"


async def test_a_gate_that_does_not_pass_spares_what_comes_after_it(make, calls):
    manager = make({"form": {"gate": 1, "weight": 0.5}, "accuracy": {"gate": 0.5}, "Judge": {}})
    reward = await run(manager, "4")
    info = reward["reward_extra_info"]
    assert reward["reward_score"] == 0.0
    assert (info["form/outcome"], info["accuracy/outcome"], info["Judge/outcome"]) == ("scored", "gated", "gated")
    assert (info["accuracy"], info["Judge"], info["reward_outcome"]) == (0.0, 0.0, "scored")
    assert calls == []
    assert (await run(manager, "<5>"))["reward_score"] == 0.5
    assert calls == []
    assert (await run(manager, "<4>"))["reward_score"] == 0.5 + 1 + 3
    assert calls == ["<4>"]


async def test_components_before_a_gate_count(make):
    manager = make({"Judge": {}, "form": {"gate": 1}, "accuracy": {}})
    assert (await run(manager, "4"))["reward_score"] == 1.0


@pytest.mark.parametrize(
    ("text", "outcome", "option"), [("down", "failed", "on_failed"), ("?", "unscored", "on_unscored")]
)
async def test_each_component_has_its_own_policy(make, text, outcome, option):
    parts = {"form": {}, "Judge": {option: "default", "default_score": -2, "weight": 3}}
    kept = await run(make(parts, **{option: "raise"}), text)
    info = kept["reward_extra_info"]
    assert kept["reward_score"] == -6.0
    assert (info["reward_outcome"], info["Judge/outcome"], info["Judge"]) == ("scored", outcome, -2.0)

    masked = await run(make({"form": {}, "Judge": {option: "mask"}}, **{option: "default"}), text)
    info = masked["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"], info["form"]) == (outcome, True, 0.0)
    assert "Judge" not in info

    inherited = await run(make({"form": {}, "Judge": {}}, **{option: "default", "default_score": -1}), text)
    assert inherited["reward_score"] == -1.0
    assert inherited["reward_extra_info"]["Judge/outcome"] == outcome


async def test_a_sum_that_is_not_finite_is_a_failure(make):
    manager = make({"form": {"weight": 2e38}, "length": {"name": "Judge", "weight": 2e38}})
    info = (await run(manager, "44444"))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert info["reward_error"] == "sample u1 (data source 'math'): its score is 1e+39, which is not finite in float32"


async def test_a_component_may_stop_the_run(make):
    with pytest.raises(RewardFunctionError, match=r"sample u1.*Judge.compute_score.*ConnectionError: judge h:1"):
        await run(make({"form": {}, "Judge": {"on_failed": "raise"}}), "down")


async def test_a_gate_that_fails_lets_nothing_through(make, calls):
    manager = make({"Judge": {"gate": 0, "on_failed": "default", "default_score": -1}, "accuracy": {}})
    reward = await run(manager, "down")
    assert (reward["reward_score"], reward["reward_extra_info"]["accuracy/outcome"]) == (-1.0, "gated")
    masked = await run(make({"Judge": {"gate": 0}, "accuracy": {}}), "down")
    assert masked["reward_extra_info"]["reward_masked"] is True


async def test_each_component_has_its_own_deadline(make):
    manager = make({"Judge": {"timeout": 0.01, "on_failed": "default"}, "accuracy": {}}, timeout=1000)
    reward = await run(manager, "hang 4")
    info = reward["reward_extra_info"]
    assert (reward["reward_score"], info["Judge/outcome"]) == (1.0, "failed")
    assert "deadline of 0.01 s" in info["Judge/error"]


@pytest.mark.parametrize("gate", [None, 0.5])
async def test_without_the_service_of_its_limits_a_run_stops(make, gate):
    limits = {"default": {"max_concurrent": 4}}
    service = LimitServer(RewardLoopConfig(limits=limits))
    address = await service.start()
    await service.stop()
    manager = make({"form": {"gate": gate}, "accuracy": {}}, limits=limits, job=address, outage_timeout_s=0)
    with pytest.raises(JobServiceError, match="unreachable"):
        await run(manager, "<4>")


async def test_a_judge_that_is_down_stops_the_run_though_it_has_a_default(make):
    manager = make({"form": {}, "Judge": {"on_failed": "default"}}, min_samples_for_failed_share=3)
    for _ in range(2):
        await run(manager, "down")
    with pytest.raises(TooManyFailuresError, match="3 of the last 3"):
        await run(manager, "down")


async def test_components_are_retried_and_their_attempts_logged(make, calls):
    parts = {"form": {}, "Judge": {"on_failed": "default"}}
    manager = make(parts, retry={"max_attempts": 2, "initial_wait": 0.001}, max_failed_share=1)
    info = (await run(manager, "down"))["reward_extra_info"]
    assert calls == ["down"] * 2
    assert (info["Judge/attempts"], info["form/attempts"], info["reward_attempts"]) == (2, 1, 2)
    assert 0 < info["Judge/wait_s"] == info["reward_wait_s"]


@pytest.mark.parametrize(("at_cap", "score"), [("stop", None), ("default", 1 - 2.0), ("mask", 0.0)])
async def test_at_cap_applies_to_components_that_are_not_called(module, at_cap, score):
    async def judge():
        async with limit("judge") as lease:
            lease.used(tokens=100)
        return 1.0

    module.judge = judge
    # Whatever the policies for other samples without a score are.
    component = {"path": "judges:judge", "on_unscored": "default", "on_failed": "default"}
    given = {"components": {"a": {**component, "default_score": 1.0}, "b": {**component, "default_score": -2.0}}}
    budget = {"max_tokens": 150, "at_cap": at_cap}
    manager = CompositeRewardLoopManager({"reward_loop": {**given, "budget": budget}})
    assert (await run(manager, "x"))["reward_score"] == 2.0
    if score is None:
        with pytest.raises(BudgetSpentError, match=r"budget is used up: 200 of reward_loop.budget.max_tokens=150"):
            await run(manager, "y")
        return
    reward = await run(manager, "y")
    assert (reward["reward_score"], reward["reward_extra_info"]["reward_masked"]) == (score, at_cap == "mask")


async def test_components_run_at_the_same_time(module):
    both = asyncio.Barrier(2)

    async def meet():
        await both.wait()
        return 1.0

    module.meet = meet
    components = {name: {"path": "judges:meet"} for name in ("first", "second")}
    manager = CompositeRewardLoopManager({"reward_loop": {"components": components}})
    assert (await manager.run_single(RewardSample("x")))["reward_score"] == 2.0


async def test_each_component_has_its_own_limit(module):
    module.free, module.tight = Counting(), Counting()
    components = {"free": {"path": "judges:free"}, "tight": {"path": "judges:tight", "limit": "service"}}
    limits = {"service": {"max_concurrent": 2}, "default": {"max_concurrent": 5}}
    manager = CompositeRewardLoopManager({"reward_loop": {"components": components, "limits": limits}})
    rewards = await asyncio.gather(*(manager.run_single(RewardSample("x")) for _ in range(20)))
    assert {reward["reward_score"] for reward in rewards} == {2.0}
    assert (module.free.peak, module.tight.peak) == (5, 2)


async def test_a_component_without_path_is_the_function_of_the_run(path):
    config = {"reward_loop": {"components": {"form": {"path": f"{path}:form"}, "rest": {"weight": 2}}}}
    manager = CompositeRewardLoopManager(config, compute_score=lambda solution_str, ground_truth: 3.0)
    assert (await run(manager, "<"))["reward_score"] == 7.0
    assert manager.requires == {"solution_str", "ground_truth"}


def test_wrong_options_are_named(path):
    def make(components):
        return CompositeRewardLoopManager({"reward_loop": {"components": components}})

    with pytest.raises(ConfigError, match=r"reward_loop\.components"):
        make({})
    with pytest.raises(ConfigError, match=r"reward_loop\.components\.a\.path"):
        make({"a": {}})
    with pytest.raises(ConfigError, match=r"reward_loop\.components\.a\.wieght.*did you mean 'weight'"):
        make({"a": {"path": f"{path}:form", "wieght": 1}})
    with pytest.raises(ConfigError, match="the name score is reserved"):
        make({"score": {"path": f"{path}:form"}})
    with pytest.raises(ConfigError, match=r"components\.a\.limit: unknown limit 'judge'"):
        make({"a": {"path": f"{path}:form", "limit": "judge"}})
    with pytest.raises(ConfigError, match=r"components\.a\.timeout has no effect without"):
        CompositeRewardLoopManager({"reward_loop": {"components": {"a": {"timeout": 3}}}}, compute_score=lambda: 1)


async def test_a_cancelled_sample_cancels_its_components(make, calls):
    task = asyncio.create_task(run(make({"Judge": {}, "accuracy": {}}), "hang"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert calls == ["hang"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_components_after_one_without_a_score_are_counted_and_logged(make):
    manager = make({"Judge": {}, "accuracy": {}, "again": {"name": "Judge"}}, min_samples_for_failed_share=1000)
    info = (await run(manager, "down 4"))["reward_extra_info"]
    assert (info["Judge/outcome"], info["accuracy/outcome"], info["again/outcome"]) == ("failed", "scored", "failed")
    assert (info["accuracy"], info["reward_masked"]) == (1.0, True)
    counted = [sum(component.failures._failed) for component in manager._components.values()]
    assert counted == [1, 0, 1]


@pytest.mark.parametrize("option", ["on_failed", "on_unscored"])
async def test_a_component_that_stops_the_run_does_so_after_one_that_masks(make, option):
    text = "down" if option == "on_failed" else "?"
    manager = make({"Judge": {option: "mask"}, "strict": {"name": "Judge", option: "raise"}})
    with pytest.raises(ScoringError, match=r"Judge\.compute_score"):
        await run(manager, text)


async def test_options_of_a_component_that_is_a_scoring_function_are_refused(module):
    module.made = ScoringFunction(lambda: 1.0, timeout=5)

    def make(**options):
        return CompositeRewardLoopManager({"reward_loop": {"components": {"a": {"path": "judges:made"} | options}}})

    assert (await run(make(weight=2), "x"))["reward_score"] == 2.0
    for name, value in {"timeout": 7, "reward_kwargs": {"a": 1}}.items():
        with pytest.raises(ConfigError, match=rf"components\.a\.{name} has no effect"):
            make(**{name: value})


async def test_post_process_scores_of_a_component_is_refused_and_that_of_the_run_gets_the_sums(tmp_path):
    class Doubles:
        def compute_score(self, solution_str):
            return 1.0

        def post_process_scores(self, scores):
            return [10 * score for score in scores]

    file = tmp_path / "doubles.py"
    file.write_text(
        "class Doubles:\n    def compute_score(self): return 1.0\n    def post_process_scores(self, s): return s\n"
    )
    own = {"reward_loop": {"components": {"a": {"path": f"{file}:Doubles"}}}}
    with pytest.raises(ConfigError, match=r"components\.a\.path: post_process_scores of Doubles.* would not be called"):
        CompositeRewardLoopManager(own)
    runs = {"reward_loop": {"components": {"a": {"weight": 3}}}}
    async with RewardAgent(CompositeRewardLoopManager(runs, compute_score=Doubles())) as agent:
        assert [reward["reward_score"] for reward in await agent.submit([RewardSample("x")])] == [30.0]


async def test_a_components_own_keys_replace_none_of_the_managers(module):
    async def judge(solution_str):
        return {"score": 1.0, "outcome": "win", "work_s": 7, "error": "of grammar", "words": 2}

    module.judge = judge
    manager = CompositeRewardLoopManager({"reward_loop": {"components": {"judge": {"path": "judges:judge"}}}})
    reward = (await run(manager, "x"))["reward_extra_info"]
    assert reward["judge/outcome"] == "scored"
    assert reward["judge/work_s"] != 7
    assert "judge/error" not in reward
    assert [reward[f"judge/{key}"] for key in ("returned_outcome", "returned_work_s", "returned_error", "words")] == [
        "win",
        7,
        "of grammar",
        2,
    ]


async def test_acc_of_a_dict_is_a_key_of_the_function_and_acc_of_a_number_is_the_score(module):
    async def judge(solution_str):
        return {"score": 0.5, "acc": True}

    async def number(solution_str):
        return 0.25

    module.judge, module.number = judge, number
    components = {name: {"path": f"judges:{name}"} for name in ("judge", "number")}
    manager = CompositeRewardLoopManager({"reward_loop": {"components": components}})
    reward = (await run(manager, "x"))["reward_extra_info"]
    assert reward["judge/acc"] is True
    assert {"number/acc", "judge/score"}.isdisjoint(reward)
    for name in components:
        assert 0 < reward[f"{name}/work_s"] < reward[f"{name}/total_s"]


def test_the_name_of_a_component_has_no_slash(path):
    with pytest.raises(ConfigError, match="name a/b contains a slash"):
        CompositeRewardLoopManager({"reward_loop": {"components": {"a": {"path": path}, "a/b": {"path": path}}}})


BY_SOURCE = {
    "accuracy": {"data_sources": ["math*", "gsm8k"], "phase": "train"},
    "exact": {"name": "accuracy", "data_sources": "math*", "phase": "validate", "weight": 2.0},
    "Judge": {"data_sources": "others", "timeout": 60, "on_failed": "default", "default_score": -1.0},
}


@pytest.mark.parametrize(
    ("source", "validate", "text", "score", "called"),
    [
        ("math_dapo", False, "4", 1.0, {"accuracy"}),
        ("math_dapo", True, "4", 2.0, {"exact"}),
        ("gsm8k", False, "5", 0.0, {"accuracy"}),
        ("essays", False, "four", 4.0, {"Judge"}),
        ("essays", True, "down", -1.0, {"Judge"}),
    ],
)
async def test_a_component_scores_its_data_sources_and_its_phase(make, source, validate, text, score, called):
    manager = make(BY_SOURCE)
    reward = await manager.run_single(RewardSample(text, source, "4", uid="u1", validate=validate))
    info = reward["reward_extra_info"]
    assert (reward["reward_score"], info["reward_outcome"]) == (score, "scored")
    assert {name for name in BY_SOURCE if name in info} == called


@pytest.mark.parametrize(
    ("source", "validate", "problem"),
    [
        ("code", False, "none of reward_loop.components scores the data source 'code' in training"),
        ("math", True, "none of reward_loop.components scores the data source 'math' in validation"),
        ("math", None, "it is not known whether a sample belongs to a validation"),
    ],
)
async def test_a_sample_that_no_component_scores_fails(make, source, validate, problem):
    manager = make({"accuracy": {"data_sources": "math", "phase": "train"}, "form": {"data_sources": "essays"}})
    reward = await manager.run_single(RewardSample("4", source, "4", uid="u1", validate=validate))
    assert reward["reward_extra_info"]["reward_outcome"] == "failed"
    assert problem in reward["reward_extra_info"]["reward_error"]


def test_others_needs_a_component_with_data_sources(make):
    with pytest.raises(ConfigError, match="no other component has data_sources"):
        make({"form": {"data_sources": "others"}, "accuracy": {}})


async def test_a_gate_holds_among_the_components_of_a_sample(make, calls):
    manager = make({"form": {"gate": 1, "data_sources": "math"}, "Judge": {"data_sources": ["math", "essays"]}})
    gated = await manager.run_single(RewardSample("4", "math", "4"))
    free = await manager.run_single(RewardSample("4", "essays", "4"))
    assert (gated["reward_extra_info"]["Judge/outcome"], free["reward_extra_info"]["Judge/outcome"]) == (
        *("gated", "scored"),
    )
    assert calls == ["4"]
