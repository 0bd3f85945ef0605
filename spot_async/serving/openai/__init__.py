"""OpenAI's `/v1` over the engine: completions and models. The rest works without this folder."""
