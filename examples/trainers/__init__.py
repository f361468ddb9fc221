"""Reward functions behind `reward-loop serve` for other trainers; docs/trainers.md says how to start each."""
