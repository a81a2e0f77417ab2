"""Searching settings: the schedule that does least damage at a given cost, and all methods at equal cost."""
