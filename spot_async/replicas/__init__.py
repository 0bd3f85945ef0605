"""Makes the servers of one role look like one server. It knows no stage, and no server's dialect.

A pool chooses the replica that a request goes to, limits how much each replica gets, and brings back those that fail.
What decides (`router`, `concurrency_limit`, `life_cycle`) is pure: no clock, no task, no
socket. `pool` is the shell around them.
"""
