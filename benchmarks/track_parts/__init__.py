"""The parts of `benchmarks.track`: the history and its regressions, the figures, and the chart.

`history.py` and `chart.py` are pure: they measure nothing, and read no clock and no file.
"""
