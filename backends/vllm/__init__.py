"""The backend for vLLM servers, which the run starts or which are already running."""

from .backend import VllmBackend

__all__ = ["VllmBackend"]
