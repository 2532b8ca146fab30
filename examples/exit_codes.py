"""Exit codes of the example scripts: 130 after Ctrl-C, 2 if the server is missing or refuses."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable

from fakevllm import SwarmError


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`.

    After Ctrl-C or SIGTERM, exit with 130. If no server answers, or if the server refuses a
    request, print the error in one line and exit with 2.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        # Threads that still run would only log the failures of abandoned episodes.
        logging.getLogger("fakevllm.sdk").setLevel(logging.CRITICAL)
