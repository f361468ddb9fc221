"""Rows as verl hands them to its reward managers, made of real answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.support.gsm8k import DATA


class CharTokenizer:
    """A token is a character."""

    eos_token = "\x03"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(int(i)) for i in ids if int(i) > 3)


def column(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def data_proto(responses: list[str], **columns: list[Any]) -> Any:
    """A padded batch; each call makes its own copy of what could be changed in place."""
    import torch
    from verl import DataProto

    prompt = CharTokenizer().encode("Q:")
    width = max(map(len, responses)) + 3
    ids = [CharTokenizer().encode(text) for text in responses]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, *prompt]] * len(ids)),
            "responses": torch.tensor([[*row, *[0] * (width - len(row))] for row in ids]),
            "attention_mask": torch.tensor(
                [[0, *[1] * (len(prompt) + len(row)), *[0] * (width - len(row))] for row in ids]
            ),
        },
        non_tensors={name: column(values) for name, values in columns.items()},
    )


def gsm8k(questions: int) -> Any:
    """The answers of four models to the first questions, each question a group, in verl's format of GSM8K."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("data_source", "reward_model", "extra_info", "uid", "session_id", "__num_turns__")
    }
    responses = []
    with (DATA / "model_solutions.jsonl").open() as file:
        for question, line in zip(range(questions), file, strict=False):
            row = json.loads(line)
            truth = row["ground_truth"].rsplit("A: ", 1)[1].replace(",", "")
            models = [name for name, value in row.items() if isinstance(value, dict)]
            for session, model in enumerate(models):
                responses.append(row[model]["solution"].replace("\nA: ", "\n#### "))
                rows["data_source"].append("openai/gsm8k")
                rows["reward_model"].append({"ground_truth": truth, "style": "rule"})
                rows["extra_info"].append({"index": question, "model": model})
                rows["uid"].append(f"q{question}")
                rows["session_id"].append(session)
                rows["__num_turns__"].append(2)
    return data_proto(responses, **rows)


def split(data: Any) -> list[Any]:
    """One ``DataProto`` a row, as verl's reward workers get them."""
    return [data[i : i + 1] for i in range(len(data))]
