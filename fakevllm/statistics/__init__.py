"""Confidence sequences for mean rewards, and for differences between two mean rewards.

This folder is pure: no I/O, no clock, no random numbers. All intervals of a sequence hold
simultaneously with the stated confidence. Therefore users may look at the results after each
session, and may stop an experiment because of what they see.
"""
