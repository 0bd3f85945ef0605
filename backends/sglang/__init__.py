"""SGLang as a backend, started by the run or already there."""

from .backend import SglangBackend

__all__ = ["SglangBackend"]
