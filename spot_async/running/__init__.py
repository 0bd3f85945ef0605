"""Opens a run: its servers, trainer and observers, from a configuration to the last file."""
