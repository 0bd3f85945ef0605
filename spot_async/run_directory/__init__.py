"""Everything a run writes, and reading it back. It decides nothing about the run."""
