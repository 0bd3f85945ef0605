"""Runs whose servers die, freeze, refuse and miss weights as a seed decides, and what must hold of them all."""
