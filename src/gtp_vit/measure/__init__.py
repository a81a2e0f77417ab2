"""Measuring a model: MACs, time, accuracy, where its patches go. Every figure knows what it was measured on."""
