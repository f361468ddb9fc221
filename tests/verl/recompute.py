"""Losses and gradients in float64, from what an engine received in an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.verl.minibatches import Update

Gradient = dict[str, torch.Tensor]


def gradient(policy: Path, update: Update, aggregation: str, *, kl_coef: float) -> Gradient:
    """The gradient of the actor's loss by hand: PPO with verl's default clipping, on the rows that are not masked.

    Args:
        policy: the directory of the model; its weights are those of the update.
        update: what the engine received.
        aggregation: verl's ``loss_agg_mode``, ``token-mean`` or ``seq-mean-token-mean``.
        kl_coef: verl's ``kl_loss_coef``, with the estimator ``low_var_kl``, which verl limits to 10 for each token.
    """
    model = _model(policy, update)
    rows = update.rows
    losses, masks = [], []
    for row in learnt(update):
        response = rows["responses"][row]
        tokens = torch.cat([rows["prompts"][row], response])
        logits = model(tokens[None]).logits[0] / update.temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[-len(response) :, 0]
        ratio = (log_probs - rows["old_log_probs"][row].double()).exp()
        loss = _clipped(rows["advantages"][row].double(), ratio)
        if "rollout_is_weights" in rows:
            loss = loss * rows["rollout_is_weights"][row].double()
        difference = rows["ref_log_prob"][row].double() - log_probs
        losses.append(loss + kl_coef * (difference.exp() - difference - 1).clamp(-10, 10))
        masks.append(rows["response_mask"][row].double())
    return _backward(model, aggregate(losses, masks, aggregation))


def check_gradients(policy: Path, call: list[Update], aggregation: str, *, kl_coef: float) -> None:
    """Check the gradients of an update call: each row that is not masked counts as much as in the mean of the call."""
    rows = sum(len(learnt(update)) for update in call) / len(call)
    for update in call:
        assert update.global_batch_size == pytest.approx(rows)
        factor = len(learnt(update)) / rows
        by_hand = gradient(policy, update, aggregation, kl_coef=kl_coef)
        scaled = {name: tensor * factor for name, tensor in by_hand.items()}
        assert norm(scaled) > 1e-6
        assert difference(scaled, update.gradient) < 1e-3


def learnt(update: Update) -> list[int]:
    """The rows that are not masked."""
    return [row for row, mask in enumerate(update.rows["response_mask"]) if mask.any()]


def aggregate(losses: list[torch.Tensor], masks: list[torch.Tensor], aggregation: str) -> torch.Tensor:
    """verl's ``loss_agg_mode``, where only these rows exist."""
    sums = torch.stack([(loss * mask).sum() for loss, mask in zip(losses, masks, strict=True)])
    counts = torch.stack([mask.sum() for mask in masks])
    return sums.sum() / counts.sum() if aggregation == "token-mean" else (sums / counts).mean()


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


def _model(policy: Path, update: Update) -> torch.nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(policy)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    missing, unexpected = model.load_state_dict(update.before, strict=False)
    # Weights that two layers share are recorded once.
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model


def _backward(model: torch.nn.Module, loss: torch.Tensor) -> Gradient:
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
