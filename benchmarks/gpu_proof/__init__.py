"""The first hour on GPUs: twelve experiments, what each expects, and one page of what they found.

`experiments.py` is the table of them. `running.py` runs each part in a process of its own, and `page.py` writes the
page. The modules beside them are the parts themselves. `kit.py` takes what they need to a machine without a network.
"""
