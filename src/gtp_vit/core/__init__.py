"""What methods and backbones share: tokens, attention, reducer, schedule, costs, the loop. Needs torch only."""
