"""Speaks as SGLang 0.5.23 was observed to: a stand-in where its CUDA kernels cannot run.

What it imitates: it binds its port by itself, starts a process of its own, answers requests for unknown models, has
flat error bodies and raw logits in ``/classify``, and is killed by what a server with ``--is-embedding`` cannot digest.
``GET /asleep`` is the stub's own.
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
    asleep = False

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
            return flat(400, "The input is longer than the model's context length")
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
            return JSONResponse({"error": {"message": "Either text, input_ids or input_embeds is needed"}}, 400)
        return {"embedding": [float(len(text))], "meta_info": {"prompt_tokens": len(text), "cached_tokens": 0}}

    @app.post("/release_memory_occupation")
    async def release(request: Request) -> Response:
        nonlocal asleep
        asleep = await request.json() == {}
        return Response()

    @app.post("/resume_memory_occupation")
    async def resume(request: Request) -> Response:
        nonlocal asleep
        asleep = await request.json() != {}
        return Response()

    @app.get("/asleep")
    async def is_asleep() -> bool:
        return asleep

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--dtype")
    parser.add_argument("--is-embedding", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true", required=True)
    parser.add_argument("--enable-weights-cpu-backup", action="store_true", required=True)
    args = parser.parse_args()
    # As SGLang's scheduler does, it lives in a process of its own.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    app = create_app(args.served_model_name, is_embedding=args.is_embedding)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
