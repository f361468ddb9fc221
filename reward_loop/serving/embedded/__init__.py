"""A small transformers server in vLLM's dialect: ``python -m reward_loop.serving.embedded --help``."""
