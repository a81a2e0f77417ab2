"""Profiles of a model: MACs, time, where its patches go, and the machine that was measured."""
