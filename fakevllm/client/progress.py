"""What a client says of itself in a script that has set up no logging."""

from __future__ import annotations

import logging


def tell_progress() -> None:
    """Its lines go to stderr, unless the script's own logging takes them."""
    logger = logging.getLogger("fakevllm.client")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s fakevllm: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
