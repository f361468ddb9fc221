"""Losses and gradients in float64, from what an engine received in an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.verl.minibatches import Update

Gradient = dict[str, torch.Tensor]
Scale = float | list[float]


def gradient(
    policy: Path, update: Update, aggregation: str = "token-mean", *, scale: Scale = 1.0, kl_coef: float = 0.0
) -> Gradient:
    """The gradient of the actor's loss by hand: PPO with verl's default clipping, on the rows that are not masked.

    Args:
        policy: the directory of the model; its weights are those of the update.
        update: what the engine received.
        aggregation: verl's ``loss_agg_mode``.
        scale: verl's ``loss_scale_factor``, of all rows or of each.
        kl_coef: verl's ``kl_loss_coef``, with the estimator ``low_var_kl``, which verl limits to 10 for each token.
    """
    model = _model(policy, update, "AutoModelForCausalLM")
    rows = update.rows
    losses, masks = [], []
    for row in learnt(update):
        response = rows["responses"][row]
        tokens = torch.cat([rows["prompts"][row], response])
        logits = model(tokens[None]).logits[0] / update.temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[-len(response) :, 0]
        ratio = (log_probs - rows["old_log_probs"][row].double()).exp()
        loss = _clipped(rows["advantages"][row].double(), ratio)
        if kl_coef:
            difference = rows["ref_log_prob"][row].double() - log_probs
            loss = loss + kl_coef * (difference.exp() - difference - 1).clamp(-10, 10)
        losses.append(loss)
        masks.append(rows["response_mask"][row].double())
    return _backward(model, aggregate(losses, masks, aggregation, scale))


def value_gradient(policy: Path, update: Update, aggregation: str = "token-mean", *, scale: Scale = 1.0) -> Gradient:
    """The gradient of the critic's loss by hand: half the squared error, without clipping.

    The arguments are those of `gradient`.
    """
    model = _model(policy, update, "AutoModelForTokenClassification")
    rows = update.rows
    losses, masks = [], []
    for row in learnt(update):
        response = rows["responses"][row]
        tokens = torch.cat([rows["prompts"][row], response])
        values = model(tokens[None]).logits[0, :-1, 0][-len(response) :]
        losses.append((values - rows["returns"][row].double()) ** 2)
        masks.append(rows["response_mask"][row].double())
    return _backward(model, 0.5 * aggregate(losses, masks, aggregation, scale))


def learnt(update: Update) -> list[int]:
    """The rows that are not masked."""
    return [row for row, mask in enumerate(update.rows["response_mask"]) if mask.any()]


def aggregate(
    losses: list[torch.Tensor], masks: list[torch.Tensor], aggregation: str, scale: Scale = 1.0
) -> torch.Tensor:
    """verl's ``loss_agg_mode``, where only these rows exist."""
    sums = torch.stack([(loss * mask).sum() for loss, mask in zip(losses, masks, strict=True)])
    counts = torch.stack([mask.sum() for mask in masks])
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "token-mean": lambda: sums.sum() / counts.sum(),
        "token-sum": lambda: sums.sum(),
        "seq-mean-token-sum": lambda: sums.mean(),
        "seq-mean-token-mean": lambda: (sums / counts).mean(),
        "seq-mean-token-sum-norm": lambda: (sums / torch.as_tensor(scale)).mean(),
    }
    return ways[aggregation]()


def difference(mine: Gradient, theirs: Gradient) -> float:
    """How far two gradients are apart, relative to the length of the first."""
    assert mine.keys() == theirs.keys()
    apart = torch.stack([(mine[name] - theirs[name].double()).norm() for name in mine]).norm()
    return float(apart / norm(mine))


def norm(of: Gradient) -> float:
    """The length of a gradient, or of weights."""
    return float(torch.stack([tensor.double().norm() for tensor in of.values()]).norm())


def _clipped(advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """PPO's loss of each token: ratios clipped to 0.8 and 1.2, and to 3 where the advantage is negative."""
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)


def _model(policy: Path, update: Update, kind: str) -> torch.nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager").double().eval()
    missing, unexpected = model.load_state_dict(update.before, strict=False)
    # Weights that two layers share are recorded once.
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model


def _backward(model: torch.nn.Module, loss: torch.Tensor) -> Gradient:
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
