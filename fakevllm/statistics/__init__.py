"""Confidence sequences for mean rewards, and for differences between two mean rewards.

The folder is pure: no I/O, no clock, no random numbers. Every interval is valid at all times at
once. Therefore users may look at the results after each session, and may stop an experiment because
of what they see.
"""
