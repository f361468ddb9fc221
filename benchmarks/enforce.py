"""What a server does with the `response_format` of `enforce=True`, with and without a reasoning parser and thinking.

The model is random and tiny, so only the form of its replies means anything.

    python -m benchmarks.enforce vllm
    python -m benchmarks.enforce sglang --python .venv-sglang/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from examples.tiny_models import build_tiny_model
from reward_loop.client import Choice, Json, Number, Pattern, Ratings, chat_complete
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import RequestError
from reward_loop.serving import RewardModelManager

REPLIES = 3
PARSERS = (None, "qwen3")
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "vllm": {"kv_cache_memory_bytes": "64M", "max_num_seqs": 16},
    "sglang": {"max_total_tokens": 16384, "constrained_json_disable_any_whitespace": True},
}
THINK = ("<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)


class Grade(BaseModel):
    reason: str
    score: int


VERDICTS = {
    "Number": Number(1, 10, enforce=True),
    "Choice": Choice({"good": 1, "bad": 0}, enforce=True),
    "Json": Json(Grade, enforce=True),
    "Ratings": Ratings({"correct": 1, "clear": 1}, enforce=True),
    "Pattern": Pattern(r"Grade ([A-C])", {"A": 1, "B": 0.5, "C": 0}, enforce=True),
}


def thinking_model(folder: Path) -> dict[str, int]:
    """Save a model whose chat template opens its reasoning; return the bias that keeps it from writing the tags."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny_model(folder, "generative", max_position_embeddings=4096)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(list(THINK))
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer))
    for part in (tokenizer, model):
        part.save_pretrained(folder)
    return {str(token): -100 for token in tokenizer.convert_tokens_to_ids(THINK)}


async def form_of(address: str, request: dict[str, Any]) -> str:
    """Return what a reply is: an object, other text, or none, and whether there is reasoning beside it."""
    try:
        reply = await chat_complete(address, "Rate the answer 4.", model="judge", max_tokens=2500, **request)
    except RequestError as error:
        return f"status {error.status}"
    if reply.cut_off:
        return "cut off"
    text = "object" if reply.text.lstrip().startswith("{") else "other text" if reply.text else "no text"
    return f"reasoning, then {text}" if reply.reasoning else text


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("engine", choices=sorted(ENGINE_ARGS))
    parser.add_argument("--python", help="the interpreter of the engine's environment")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    bias = thinking_model(folder / "model")
    for reasoning_parser in PARSERS:
        engine_args = ENGINE_ARGS[arguments.engine] | (
            {"reasoning_parser": reasoning_parser} if reasoning_parser else {}
        )
        model = ServedModelConfig(
            model_path=str(folder / "model"),
            engine=arguments.engine,
            python=arguments.python,
            device="cpu",
            dtype="float32",
            max_model_len=4096,
            start_timeout_s=1200,
            engine_args=engine_args,
        )
        async with RewardModelManager(RewardModelConfig(models={"judge": model}, log_dir=str(folder))) as models:
            for thinks in (True, False):
                found = {}
                for name, verdict in VERDICTS.items():
                    request = {
                        **verdict.request,
                        "temperature": 1.0,
                        "chat_template_kwargs": {"enable_thinking": thinks},
                    }
                    request |= {} if thinks else {"logit_bias": bias}  # a random model writes the tags in a text
                    asked = [
                        form_of(models.reward_router_address, {**request, "seed": seed}) for seed in range(REPLIES)
                    ]
                    found[name] = dict(Counter(await asyncio.gather(*asked)))
                print(f"{arguments.engine}, parser {reasoning_parser}, thinking {thinks}: {found}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
