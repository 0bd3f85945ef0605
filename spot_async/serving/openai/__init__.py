"""OpenAI's `/v1` over the engine, for clients that read a teacher's scores: models and completions.

Only `serving/server.py` knows of this folder. The server's own API in `http/` works without it.
"""
