"""The command ``reward-loop serve``: a reward manager as an HTTP service, for trainers that can call a URL."""
