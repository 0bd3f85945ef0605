"""The servers of one role as one: which of them a request goes to, how much each gets, and what happens when one fails.

What is decided (`router`, `concurrency_limit`, `life_cycle`) and counted (`occupancy`) is pure: no clock, no task, no
socket. `pool` is the shell.
"""
