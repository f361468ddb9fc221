"""An environment with several turns: the player guesses a secret number, and is told whether it is higher or lower.

Play it without a trainer: the player halves the range, and the reward function of this folder judges each game.

    python -m examples.guessing.game
"""

from __future__ import annotations

import asyncio
import random
import re

import reward_loop

MAX_GUESSES = 3
LARGEST = 99


class Game:
    """One game. `answer` takes the player's texts, in turn."""

    def __init__(self, secret: int) -> None:
        self.secret = secret
        self.guesses: list[int | None] = []
        """The number in each text of the player; ``None`` for a text without one."""
        self.transcript = ""
        self.messages: list[dict[str, str]] = []
        """The turns of the game, which `reward-loop view` shows."""

    @property
    def is_over(self) -> bool:
        return len(self.guesses) == MAX_GUESSES or self.secret in self.guesses

    def answer(self, text: str) -> str:
        """Take a guess, and return what the player is told."""
        number = re.search(r"\d+", text)
        guess = None if number is None else int(number[0][:9])
        self.guesses.append(guess)
        if guess is None:
            told = "That is not a number."
        elif guess == self.secret:
            told = "Right."
        else:
            told = "Higher." if guess < self.secret else "Lower."
        self.transcript += f"Player: {text}\nGame: {told}\n"
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
        return told

    def evidence(self) -> dict[str, object]:
        """What the reward function receives as ``extra_info``."""
        return {"guesses": self.guesses, "largest": LARGEST, "completion": self.messages}


async def play(secret: int) -> reward_loop.Reward:
    """Play one game with a player that halves the range, and return its reward."""
    game = Game(secret)
    low, high = 0, LARGEST
    while not game.is_over:
        guess = (low + high) // 2
        told = game.answer(f"I guess {guess}.")
        low, high = (guess + 1, high) if told == "Higher." else (low, guess - 1)
    return await reward_loop.score(game.transcript, ground_truth=secret, extra_info=game.evidence())


async def main() -> None:
    secrets = random.Random(0).sample(range(LARGEST + 1), 5)
    async with reward_loop.scorer("examples/guessing/reward.py:compute_score", {"timeout": 60}):
        rewards = await asyncio.gather(*map(play, secrets))
    for secret, reward in zip(secrets, rewards, strict=True):
        print(f"secret {secret:2}: reward {reward['reward_score']:.2f}, {reward['reward_extra_info']['guesses']}")


if __name__ == "__main__":
    asyncio.run(main())
