"""Checks whether a run can work: its files before anything starts, its servers once they run. It starts no server.

`plan.py`, `served.py` and `machine.py` read files. `questions.py` asks a server what it does; `server_diagnosis.py`,
`agreement.py` and `diagnosis.py` draw conclusions for it, for a role and for the run. `capabilities.py` compares what
servers offer with what the run needs.
"""
