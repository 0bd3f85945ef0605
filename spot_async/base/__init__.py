"""Helpers that every room uses: asyncio, retries, wire encoding, text, seeds. They know nothing of distillation."""
