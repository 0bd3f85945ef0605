"""Selects positions when servers show only the top of a distribution: bounds of scores, certainty, selection."""
