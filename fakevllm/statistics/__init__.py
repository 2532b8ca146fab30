"""Confidence sequences for mean rewards and for differences between two of them.

The folder is pure: no I/O, no clock, no random numbers. Every interval holds at all times. Results
may therefore be looked at after each session, and an experiment may be stopped at any of these
looks.
"""
