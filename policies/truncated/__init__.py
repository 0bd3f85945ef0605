"""What can be known of a score when servers show only the top of a distribution: bounds, certainty, selection."""
