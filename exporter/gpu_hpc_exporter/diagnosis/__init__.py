"""Counters to causes: pure functions and one table of thresholds."""
