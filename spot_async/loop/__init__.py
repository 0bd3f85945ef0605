"""The loop of a run: admits prompts, collects their supervision in order, hands out batches. It opens no server."""
