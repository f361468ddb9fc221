"""Try a reward function before a run."""
