"""The local inference server, which `spot-async serve` and the `local` backend start. It knows nothing of training.

`engine/` computes in torch. `http/` is our own API over the engine, and `openai/` is what a teacher needs of OpenAI's.
"""
