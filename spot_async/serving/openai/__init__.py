"""OpenAI's `/v1` over the engine. The rest works without this folder."""
