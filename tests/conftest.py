"""What holds for every test."""

from __future__ import annotations

import signal

# A shell's background job ignores Ctrl-C, and so would every process started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)
