"""What holds for every test."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell's background job ignores Ctrl-C, and so would every process started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: what fails today has failed yesterday. HYPOTHESIS=search looks for
# new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS", "repeatable"))
