"""Limits on concurrency, requests, tokens and cost, shared by all workers of a job."""
