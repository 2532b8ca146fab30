"""Send the prompts of calls as bytes in front of a response's body, instead of as text in the
body's JSON.

A response with token ids consists mostly of long prompts. Token ids that are sent as raw int32 need
not be converted to text and back. Only processes of this project send prompts in this form, and
only to a client that asks for it. The bytes are in the byte order of the machine (little-endian).
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

PROMPTS_HEADER = "X-Fakevllm-Prompt-Bytes"
"""Request header with which a client asks for separate prompts (value ASKED). In the response, the
header has the number of bytes of each prompt, separated by commas. The prompts precede the rest of
the body. A response without this header has no separate prompts."""
ASKED = "1"


def sizes_header(prompts: Sequence[bytes]) -> str:
    """Return the value of the response header PROMPTS_HEADER: the number of bytes of each prompt,
    separated by commas."""
    return ",".join(str(len(prompt)) for prompt in prompts)


def parse_sizes(value: str | None) -> list[int]:
    """Return the sizes, in bytes, of the prompts that are sent in front of a response's body.
    `value` is the value of the response header PROMPTS_HEADER. Return [] if the response has no
    such header. Raises ValueError if the value is malformed.

    >>> parse_sizes("8,4"), parse_sizes(None)
    ([8, 4], [])
    """
    return [int(size) for size in value.split(",")] if value else []
