"""The server's own HTTP API over the engine."""
