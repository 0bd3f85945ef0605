"""The backend for our own server, which the run starts or which is already running."""

from .backend import LocalBackend

__all__ = ["LocalBackend"]
