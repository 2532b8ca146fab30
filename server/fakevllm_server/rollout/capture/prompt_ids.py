"""Read the token ids of a prompt from an engine's answer, before the answer is parsed.

A long prompt makes most of an answer. vLLM writes its ids as decimal numbers, once for each choice
of a stream. The bundled engines write them once for each answer, packed as base64 of int32, if the
request has the field REQUEST_FIELD. No vLLM has this field.

The module does no I/O.
"""

from __future__ import annotations

import binascii
import re
from collections import deque

import orjson

from fakevllm_adapters.vllm_compat.chat_response import PACKED_PROMPT_IDS
from fakevllm_server.types.calls import checked_ids
from fakevllm_server.types.number_arrays import IdArray, id_array

REQUEST_FIELD = "return_packed_prompt_ids"
MAX_RECENT = 8
"""Maximum number of prompts in memory. The calls of a group usually arrive shortly one after the
other."""
MAX_RECENT_BYTES = 16 * 2**20
"""Maximum size of the packed prompts in memory."""

_PACKED = b',"%b":"' % PACKED_PROMPT_IDS.encode()
"""Beginning of the field. Inside a JSON string, its quotes would be escaped."""
_DECIMAL = re.compile(rb'"prompt_token_ids":\s*\[')


class PackedPrompts:
    """The reader of packed prompts. It keeps the latest ones, so that the calls of a group share
    one array, which is decoded once."""

    def __init__(self) -> None:
        self._recent: deque[tuple[bytes, IdArray]] = deque(maxlen=MAX_RECENT)

    def cut(self, data: bytes) -> tuple[bytes, IdArray | None]:
        """Return the JSON text of an answer or of a chunk without the packed ids of the prompt, and
        the ids. The ids are None if the text has none. Raises ValueError if they are malformed."""
        begin = data.rfind(_PACKED)
        if begin < 0:
            return data, None
        end = data.find(b'"', begin + len(_PACKED))
        ids = self._unpack(data[begin + len(_PACKED) : end])
        return data[:begin] + data[end + 1 :], ids

    def _unpack(self, text: bytes) -> IdArray:
        for known, ids in self._recent:
            if known == text:
                return ids
        packed = binascii.a2b_base64(text)
        ids = id_array(())
        ids.frombytes(packed)
        if not packed[3::4].isascii():  # the sign bits
            raise ValueError("the prompt contains something that is not an id")
        self._recent.append((text, ids))
        while len(self._recent) > 1 and sum(len(one) for one, _ in self._recent) > MAX_RECENT_BYTES:
            self._recent.popleft()
        return ids


class DecimalPrompt:
    """The reader of a prompt that several choices repeat as decimal numbers. It parses the numbers
    once, and compares their text for the other choices."""

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._ids = id_array(())

    def cut(self, data: bytes) -> tuple[bytes, IdArray | None]:
        """Return the JSON text of a chunk with null in place of the prompt's ids, and the ids. The
        ids are None if the chunk has none. Raises ValueError if they are malformed."""
        match = _DECIMAL.search(data)
        end = -1 if match is None else data.find(b"]", match.end()) + 1
        if match is None or not end:
            return data, None
        begin = match.end() - 1
        is_repeated = self._text is not None and data.startswith(self._text, begin)
        if not is_repeated:
            self._text = data[begin:end]
            self._ids = checked_ids(orjson.loads(self._text))
        return b"%bnull%b" % (data[:begin], data[end:]), self._ids
