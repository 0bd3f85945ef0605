"""`spot-async check`: what a run needs, and whether its files, machine and servers have it. It trains nothing."""
