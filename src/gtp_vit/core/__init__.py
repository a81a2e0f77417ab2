"""Common parts of methods and backbones: tokens, attention, reducer, schedule, costs, the loop. Needs torch only."""
