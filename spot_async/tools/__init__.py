"""Holds the commands beside a run. They read files or ask servers; only `cli/` imports them, and no run needs them."""
