"""Sweeps: many runs from one file, and one table of their results."""
