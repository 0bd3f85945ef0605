"""Environments: what answers a model's turns, in processes that can be killed."""
