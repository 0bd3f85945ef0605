"""The trainer on several machines: which node this is, where nodes meet, and what those do that join.

Ranks, their groups and their rendezvous are torch's (`launcher.py`, `parallel.py`).
"""
