"""How a script of these ends: Ctrl-C is no error, and what a server says is one line."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable

from fakevllm import SwarmError


def run(main: Callable[[], None]) -> None:
    """Exits with 130 after Ctrl-C or a TERM, with 2 where the server was not there or refused."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        # what its threads still say is of episodes that are given up
        logging.getLogger("fakevllm.sdk").setLevel(logging.CRITICAL)
