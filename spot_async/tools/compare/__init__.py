"""`spot-async compare`: puts evaluations beside each other, in tables, intervals and curves. It evaluates nothing."""
