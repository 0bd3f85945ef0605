"""`spot-async data check`: what there is to know of a problem set before a run learns from it."""
