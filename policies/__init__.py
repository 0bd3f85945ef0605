"""The five methods and `distill`, and the maths they share. Each is a coroutine over stages; none knows a server.

`opd`, `eopd`, `spot`, `grpo` and `kd` are the methods. `acquisition`, `targets` and `samples` are their
parts. `truncated/` selects positions where servers show only the top of a distribution.
"""
