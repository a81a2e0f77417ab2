"""What a model costs: MACs, time, where its patches go, and the machine that was measured."""
