"""Measuring a model: MACs, time, accuracy, and where its patches go."""
