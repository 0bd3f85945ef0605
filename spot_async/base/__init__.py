"""What every room stands on: asyncio, retries, wire encoding, text, seeds. It knows nothing of distillation."""
