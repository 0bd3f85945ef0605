"""The inference engine: continuous batching over key/value slots, in torch. It knows nothing of HTTP."""
