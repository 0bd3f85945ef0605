"""`spot-async tune`: measures how many requests each server pays for, and recommends limits. It changes no run."""
