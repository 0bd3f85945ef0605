"""The local engine as a backend: our own server, started by the run or already there."""

from .backend import LocalBackend

__all__ = ["LocalBackend"]
