"""The backend for SGLang servers, which the run starts or which are already running."""

from .backend import SglangBackend

__all__ = ["SglangBackend"]
