"""The inference engines that serve reward models: vLLM, SGLang and transformers."""
