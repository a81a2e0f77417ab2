"""Finetuning with the reduction active: timm's optimisers, schedules and augmentation, torch's distribution.

Everything random is drawn from (seed, epoch, step, part), never from what went before. That is why a run that was
stopped resumes bit for bit, and why the number of processes changes nothing but rounding.
"""
