"""A model directory: its files, vocabulary and end tokens, and which output row decides which token."""
