"""Checks a reward function before a run (``reward-loop check``)."""
