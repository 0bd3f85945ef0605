"""The trainer ranks: they take batches of supervision, step the student, publish its weights. They know no method."""
