"""`spot-async tune`: how many requests each server takes at a time, and the limits that follow."""
