"""Our manager beside verl's own, on a real DataProto."""

import numpy as np
import pytest

from reward_loop import NaiveRewardLoopManager

SOURCE = """
class Judge:
    def compute_score(self, solution_str, ground_truth, scale):
        return scale * float(solution_str == ground_truth)

def number(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth) + extra_info["level"]

async def mapping(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "turns": extra_info["num_turns"], "text": solution_str}

def with_address(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    return {"score": 1.0, "address": reward_router_address, "calls": extra_info["calls"]}

def configured(data_source, solution_str, ground_truth, extra_info, scale):
    return scale * float(solution_str == ground_truth)
"""


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(int(i)) for i in ids if int(i) > 2)


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl")


@pytest.fixture
def config(tmp_path):
    """Build verl's configuration, as far as its reward managers read it."""
    from omegaconf import OmegaConf

    path = tmp_path / "reward.py"
    path.write_text(SOURCE)

    def make(name, **reward_kwargs):
        manager = {"source": "importlib", "name": "NaiveRewardLoopManager"}
        manager["module"] = {"path": "pkg://reward_loop.managers", "name": "unused"}
        return OmegaConf.create(
            {
                "reward": {
                    "reward_manager": manager,
                    "custom_reward_function": {"path": str(path), "name": name, "reward_kwargs": reward_kwargs},
                }
            }
        )

    return make


def data_proto(verl, turns=3):
    import torch

    def column(value):
        array = np.empty(1, dtype=object)
        array[0] = value
        return array

    ids = [ord(letter) for letter in "yes"]
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 104, 105]]),
            "responses": torch.tensor([[*ids, 1, 65, 65]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0]]),
        },
        non_tensors={
            "data_source": column("math"),
            "reward_model": column({"ground_truth": "yes", "style": "rule"}),
            "extra_info": column({"level": 2}),
            "tool_extra_fields": column({"calls": 4}),
            "__num_turns__": column(turns),
        },
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "kwargs"), [("number", {}), ("mapping", {}), ("with_address", {}), ("configured", {"scale": 3})]
)
async def test_rewards_equal_those_of_verls_manager(verl, config, name, kwargs):
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import load_reward_manager

    address = {"reward_router_address": "host:1" if name == "with_address" else None, "reward_model_tokenizer": None}
    options = config(name, **kwargs)
    ours = load_reward_manager(options, Tokenizer(), **address)
    assert type(ours) is NaiveRewardLoopManager
    options.reward.reward_manager.update({"source": "register", "name": "naive"})
    theirs = load_reward_manager(options, Tokenizer(), **address)
    assert type(theirs) is NaiveRewardManager

    expected = await theirs.run_single(data_proto(verl))
    reward = await ours.run_single(data_proto(verl))
    assert reward["reward_score"] == expected["reward_score"]
    info = reward["reward_extra_info"]
    assert {key: info[key] for key in expected["reward_extra_info"]} == expected["reward_extra_info"]
    assert info["reward_outcome"] == "scored"


@pytest.mark.integration
async def test_a_class_that_verl_cannot_call_works(verl, config):
    # A class, which lacks parameters that verl always passes.
    from verl.trainer.ppo.reward import load_reward_manager

    ours = load_reward_manager(
        config("Judge", scale=2), Tokenizer(), reward_router_address=None, reward_model_tokenizer=None
    )
    assert (await ours.run_single(data_proto(verl)))["reward_score"] == 2.0
    assert (await ours.run_single(data_proto(verl)[0]))["reward_score"] == 2.0


@pytest.mark.integration
async def test_verls_default_function(verl):
    from verl.utils.reward_score import default_compute_score

    data = data_proto(verl)
    data.non_tensor_batch["data_source"][0] = "openai/gsm8k"
    reward = await NaiveRewardLoopManager(None, Tokenizer(), default_compute_score).run_single(data)
    assert reward["reward_extra_info"]["reward_error"] == ""
    assert reward["reward_score"] == 0.0
