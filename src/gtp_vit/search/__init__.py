"""Searching settings: the schedule that does least damage at a cost, and all methods at the same cost."""
