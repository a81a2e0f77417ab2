"""The parts every method and backbone meets in: tokens, attention, reducer, schedule, costs, the loop.

Needs torch only.
"""
