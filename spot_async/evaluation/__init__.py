"""Measures a student on benchmarks: prompts, responses, verdicts, figures. It starts no server."""
