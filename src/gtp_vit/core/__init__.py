"""The parts every method and backbone meets in: tokens, attention, reducer, schedule, the loop.

Needs torch, numpy and safetensors.
"""
