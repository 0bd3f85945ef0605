"""The commands of `spot-async`; `cli.py` makes one program of them."""
