"""What methods and backbones share: tokens, attention, reducer, schedule, the loop. Needs torch only."""
