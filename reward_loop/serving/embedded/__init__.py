"""A small transformers server with vLLM's HTTP API: ``python -m reward_loop.serving.embedded.app --help``."""
