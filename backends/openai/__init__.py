"""The backend for any OpenAI-compatible endpoint, which generates and scores. Its weights are its own."""

from .backend import OpenAIBackend

__all__ = ["OpenAIBackend"]
