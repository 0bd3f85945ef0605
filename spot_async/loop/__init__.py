"""Runs the loop of a run: admits prompts, supervises them, trains on batches, sends new weights. It opens no server."""
