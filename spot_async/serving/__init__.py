"""The local inference server: `spot-async serve`, and what the `local` backend starts."""
