"""The inference engine: continuous batching over key/value slots, in torch. It speaks no HTTP."""
