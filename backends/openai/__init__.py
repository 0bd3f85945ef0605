"""Any OpenAI-compatible endpoint as a backend: it generates and scores, and its weights are its own."""

from .backend import OpenAIBackend

__all__ = ["OpenAIBackend"]
