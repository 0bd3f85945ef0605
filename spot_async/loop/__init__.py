"""Runs the training loop: admits prompts, supervises them, trains on batches, sends new weights. It opens no server."""
