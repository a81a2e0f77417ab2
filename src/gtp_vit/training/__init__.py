"""Finetuning with the reduction active: timm's optimisers, schedules and augmentation, torch's distribution.

Random numbers depend on (seed, epoch, step, part) only. So a stopped run resumes bit for bit, and the number of
processes changes nothing but rounding.
"""
