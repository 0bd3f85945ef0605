"""The server's own HTTP API over the engine: who may ask, requests in, replies out. It never runs torch."""
