"""Write GSM8K in verl's format: data/gsm8k/train.parquet and data/gsm8k/test.parquet.

Run it before the scripts in `examples/`:

    python examples/gsm8k/prepare.py                    # from the Hugging Face hub
    python examples/gsm8k/prepare.py --jsonl FOLDER     # from FOLDER/train.jsonl and FOLDER/test.jsonl
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = "Think step by step. Write the final answer, a number, on the last line after `####`."


def row(problem: dict[str, str], split: str, index: int) -> dict:
    """Return one problem as a row of verl's data: the prompt, the ground truth and what reward functions may need."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{problem['question']}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem["answer"].rpartition("####")[2].strip()},
        "extra_info": {"split": split, "index": index, "question": problem["question"], "answer": problem["answer"]},
    }


def problems(split: str, folder: Path | None) -> Iterable[dict[str, str]]:
    """Read the problems of a split from a folder, or download them if no folder is given."""
    if folder is None:
        from datasets import load_dataset

        return load_dataset("openai/gsm8k", "main", split=split)
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, metavar="FOLDER", help="read train.jsonl and test.jsonl of this folder")
    parser.add_argument("--output", type=Path, default=Path("data/gsm8k"), help="output folder (default: %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [row(problem, split, index) for index, problem in enumerate(problems(split, options.jsonl))]
        path = options.output / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()
