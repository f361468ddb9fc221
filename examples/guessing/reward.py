"""The reward of a game: 1 for the right number, otherwise less for each step between the best guess and the secret."""

from __future__ import annotations

from typing import Any


async def compute_score(ground_truth: int | str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return the score and the guesses. A game without any number has the score 0."""
    distances = [abs(guess - int(ground_truth)) for guess in extra_info["guesses"] if guess is not None]
    score = 1 - min([*distances, extra_info["largest"]]) / extra_info["largest"]
    return {"score": score, "acc": float(score == 1), "guesses": str(extra_info["guesses"])}
