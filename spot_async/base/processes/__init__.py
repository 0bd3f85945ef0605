"""Processes of a run: children that cannot outlive their parent, the cores they may use, what they do with memory."""
