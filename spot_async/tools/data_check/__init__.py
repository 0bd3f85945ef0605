"""`spot-async data check`: shows what a problem set holds before a run learns from it. It changes no file."""
