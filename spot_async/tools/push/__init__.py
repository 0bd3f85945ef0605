"""`spot-async push`: uploads a run's student to the Hugging Face hub, with a model card that its files fill in."""
