"""The trainer on several machines: which node this is, where nodes meet, and what those do that join.

The groups of ranks and their rendezvous are torch's (`parallel.py`).
"""
