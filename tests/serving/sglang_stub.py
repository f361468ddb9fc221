"""Answers as SGLang 0.5.23 does, and starts in a second; `test_real_sglang.py` runs the real one, on a CPU.

It binds its port itself, starts a process of its own, answers requests for unknown models, and has flat error bodies
and raw logits in ``/classify``. As SGLang does, it dies of requests that a server with ``--is-embedding`` cannot
process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response


def create_app(name: str, *, is_embedding: bool) -> FastAPI:
    app = FastAPI()

    def flat(status: int, message: str) -> JSONResponse:
        body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
        return JSONResponse(body, status)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "sglang", "root": name}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        if is_embedding:
            os._exit(9)
        body = await request.json()
        text = body["messages"][-1]["content"]
        if len(text) > 100:
            return flat(400, f"The input ({len(text)} tokens) is longer than the model's context length (100 tokens).")
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        return {
            "id": "0",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "matched_stop": 257}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": None},
        }

    @app.post("/classify")
    async def classify(request: Request) -> Any:
        text = (await request.json()).get("text")
        if text == "":
            os._exit(9)
        if not isinstance(text, str):
            return JSONResponse({"error": {"message": "At least one of text, input_ids, ... should be provided"}}, 400)
        return {"embedding": [float(len(text))], "meta_info": {"prompt_tokens": len(text), "cached_tokens": 0}}

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--dtype")
    parser.add_argument("--tp-size")
    parser.add_argument("--dp-size")
    parser.add_argument("--is-embedding", action="store_true")
    args = parser.parse_args()
    # As SGLang's scheduler does, it lives in a process of its own.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    app = create_app(args.served_model_name, is_embedding=args.is_embedding)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
