"""vLLM as a backend, started by the run or already there."""

from .backend import VllmBackend

__all__ = ["VllmBackend"]
