"""Creates models with random weights and their tokenizer without downloads or a GPU; tiny ones in under a second.

``python -m examples.tiny_models FOLDER --data .`` saves one, and data to try a run with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from examples.training import write_dataset

PAD = "<|pad|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """Return a byte-level tokenizer: 256 byte tokens and three special tokens. The eos token is ``<|im_end|>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def build_tiny_model(
    path: str | Path,
    kind: Literal["generative", "discriminative"],
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: tuple[int, int] = (2, 1),
    intermediate_size: int | None = None,
    dtype: str = "float32",
    max_position_embeddings: int = 512,
    seed: int = 0,
) -> Path:
    """Save a Qwen2 model with random weights and its tokenizer to ``path``, and return ``path``.

    ``heads`` are those of queries and of keys and values; ``intermediate_size`` is twice ``hidden_size`` by default.

    The discriminative model has one label and a ``score.bias`` of zero, because SGLang fills a missing bias randomly.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=max_position_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.8 / hidden_size**0.5,  # the logits of models of all sizes have the same spread
        dtype=dtype,
    )
    if kind == "discriminative":
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "generative":
            model = Qwen2ForCausalLM(config)
        else:
            model = Qwen2ForSequenceClassification(config)
            head = torch.nn.Linear(hidden_size, 1)
            head.weight.data.normal_(std=0.5)
            head.bias.data.zero_()
            model.score = head
    path = Path(path)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def main() -> None:
    """Save a model, and data, to the folders on the command line."""
    parser = argparse.ArgumentParser(description="Save a tiny model with random weights, and its tokenizer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["generative", "discriminative"], default="generative")
    parser.add_argument("--data", type=Path, metavar="DIR", help="also write train.parquet and val.parquet there")
    arguments = parser.parse_args()
    print(f"The model is in {build_tiny_model(arguments.folder, arguments.kind)}")
    if arguments.data is not None:
        arguments.data.mkdir(parents=True, exist_ok=True)
        for split, numbers in (("train", range(64)), ("val", range(64, 72))):
            problems = [(f"{number} + 1 =", str(number + 1)) for number in numbers]
            write_dataset(arguments.data / f"{split}.parquet", "sums", split, problems)


if __name__ == "__main__":
    main()
