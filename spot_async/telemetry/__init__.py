"""Shows a run to people and programs while it goes on: console, files, metrics, trace, verdict."""
