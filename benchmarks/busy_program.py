"""A program that uses a share of one core, in short bursts, until it is killed.

    python -m benchmarks.busy_program SHARE

`benchmarks.console_load` runs it in place of consoles that use the same share.
"""

from __future__ import annotations

import sys
import time

BURST_S = 0.02


def main(share: float) -> None:
    """Use the share of a core, which is above 0 and below 1."""
    while True:
        end = time.process_time() + BURST_S
        while time.process_time() < end:
            sum(range(500))
        time.sleep(BURST_S / share - BURST_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
