"""Before a start: what a run will ask of endpoints and machines, and about how long it takes. Not measured."""
