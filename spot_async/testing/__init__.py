"""Simulates time and services for tests: ours, and those of your own policies and backends. No run imports it."""
