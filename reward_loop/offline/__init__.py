"""Scores files of stored rollouts with the managers and functions of a training run. Runs are resumable."""
