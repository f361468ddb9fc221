"""slime and miles: ``--custom-rm-path reward_loop.adapters.slime.custom_rm``.

`custom_rm` scores single samples, and with ``--group-rm`` whole groups. `normalise` leaves samples without a score out
of the baseline of their group. Nothing of slime is imported: its samples and arguments are used by their fields.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from reward_loop._util.text import listing
from reward_loop.adapters.process_agent import ProcessAgent, process_agent
from reward_loop.errors import ConfigError
from reward_loop.types import Outcome, RewardResult, RewardSample, returned_numbers

__all__ = ["custom_rm", "normalise"]

_LACKS = frozenset({"global_steps", "training_progress", "validate"})

_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED = ("grpo", "gspo", "cispo")
"""The estimators for which slime subtracts the mean of the group, and those for which it divides by the deviation."""


async def custom_rm(args: Any, sample: Any, **_: Any) -> Any:
    """Return the reward of a sample, or the rewards of a list of samples.

    A sample without a score (masked) gets ``remove_sample``, so slime sets its loss mask to zeros; its reward is 0.
    With ``--reward-key``, a reward is a dict of the components, in which ``score`` is the reward. ``sample.metadata``,
    if it is a dict, gets the outcome and the components under ``reward_loop``. ``extra_info`` contains the metadata and
    the label, which is the ground truth unless the option ``ground_truth`` names a field of the metadata.

    Args:
        args: slime's arguments. ``reward_loop_config``, which a file of ``--custom-config-path`` can set, contains the
            options or the path of their file; by default, the file in ``REWARD_LOOP_CONFIG`` is used.
        sample: a ``slime.utils.types.Sample``, or a list of them: with ``--group-rm`` a group.

    Raises:
        ConfigError: an option is invalid, the manager compares samples and ``--group-rm`` is not set, or a reward
            has no component with the name in ``--reward-key``.
        RewardLoopError: an error that must stop the run, such as too many failures.
    """
    agent = await process_agent(getattr(args, "reward_loop_config", None), lacks=_LACKS)
    is_group = bool(getattr(args, "group_rm", False))
    if agent.needs_group and not is_group:
        raise ConfigError(
            f"the manager {agent.config.manager!r}, or post_process_scores, compares the samples of a group: "
            "set --group-rm"
        )
    samples = sample if isinstance(sample, list) else [sample]
    if not samples:
        return []
    results = await agent.score(
        [_to_sample(agent, each, is_group) for each in samples], [len(samples)] if is_group else None
    )
    values = [_apply(args, each, result) for each, result in zip(samples, results, strict=True)]
    return values if isinstance(sample, list) else values[0]


def _to_sample(agent: ProcessAgent, sample: Any, is_group: bool) -> RewardSample:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    # Left out: `_apply` writes it, and a sample may be scored again.
    data = {name: value for name, value in metadata.items() if name != "reward_loop"}
    return RewardSample(
        sample.response,
        **agent.parts({**data, "label": sample.label}, "label"),
        uid=None if sample.index is None else str(sample.index),
        response_length=sample.response_length,
        response_ids=_response_ids(sample),
        is_truncated=_is_truncated(sample),
        validate=None,
        # In a group, the agent sets a name that no other group has.
        group=None if is_group or sample.group_index is None else str(sample.group_index),
        prompt=sample.prompt,
    )


def _response_ids(sample: Any) -> list[int] | None:
    """Return the last tokens of a sample, which are the response."""
    tokens, length = getattr(sample, "tokens", None), sample.response_length
    return None if not tokens or length is None else list(tokens[len(tokens) - length :])


def _is_truncated(sample: Any) -> bool | None:
    status = getattr(sample, "status", None)
    return None if status is None else getattr(status, "value", status) == "truncated"


def _apply(args: Any, sample: Any, result: RewardResult) -> Any:
    """Mark the sample, and return its reward in the form that slime expects."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    earlier = metadata.get("reward_loop")
    if result.reward is None:
        sample.remove_sample = True
    elif isinstance(earlier, dict) and earlier.get("reward_masked"):
        sample.remove_sample = False  # an earlier call removed it
    metadata["reward_loop"] = {
        **returned_numbers(result.extra_info),
        "reward_outcome": str(result.outcome),
        "reward_masked": result.masked,
        "reward_error": result.reason or "",
    }
    score = result.reward or 0.0
    keys = {key for name in ("reward_key", "eval_reward_key") if (key := getattr(args, name, None))}
    if not keys:
        return score
    value = {**returned_numbers(result.extra_info), "score": score}
    for key in sorted(keys - value.keys()):
        if result.outcome is Outcome.SCORED:
            raise ConfigError(
                f"sample {sample.index}: its reward has no component {key!r}, which --reward-key names; it has "
                f"{listing(value)}"
            )
        value[key] = score
    return value


def normalise(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Subtract the mean of each group, and divide by its deviation, without the samples that are removed.

    For ``--custom-reward-post-process-path``. It computes what slime computes by itself, except that a removed sample
    (``remove_sample``) is not part of its group, and gets the advantage 0.

    Args:
        args: slime's arguments.
        samples: the samples of a rollout step; a group is the samples with the same ``group_index``.

    Returns:
        The raw rewards, and the normalised ones.

    Raises:
        ConfigError: a sample has no ``group_index``, or a rollout has several samples.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    if args.advantage_estimator not in _NORMALISED or not args.rewards_normalization:
        return raw, list(raw)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        if sample.group_index is None:
            raise ConfigError(f"sample {sample.index} has no group_index: leave out --custom-reward-post-process-path")
        if not sample.remove_sample:
            groups[sample.group_index].append(i)
    rollouts = [sample.rollout_id for sample in samples if sample.rollout_id is not None]
    if len(set(rollouts)) < len(rollouts):
        raise ConfigError("a rollout has several samples: leave out --custom-reward-post-process-path")
    divides = args.advantage_estimator in _DIVIDED and args.grpo_std_normalization
    normalised = [0.0] * len(raw)
    for members in groups.values():
        rewards = [raw[i] for i in members]
        mean = fmean(rewards)
        scale = (stdev(rewards) if len(rewards) > 1 else 0.0) + 1e-6 if divides else 1.0
        for i in members:
            normalised[i] = (raw[i] - mean) / scale
    return raw, normalised
