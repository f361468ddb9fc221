"""Limits on concurrency, requests, tokens and cost that hold for all workers of a job."""
