"""Read the prompt's token ids from a stream in which several choices repeat the ids. The ids are
parsed only once. They are cut out of each chunk before the chunk is parsed.

vLLM repeats the ids of the prompt, as decimal numbers, in the first chunk of each choice. If the
prompt is long, most bytes of the chunk belong to the ids. The module does no I/O.
"""

from __future__ import annotations

import re

import orjson

from fakevllm_server.types.calls import checked_ids
from fakevllm_server.types.number_arrays import IdArray, id_array

_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\s*\[')
"""Pattern of the beginning of the field. Text of the model does not match, because quotes inside a
JSON string are escaped."""


class RepeatedPrompt:
    """The reader of the prompt's token ids in a stream in which each choice repeats the ids. The
    reader parses the ids of the first choice. For the other choices, it only compares the text of
    the ids."""

    def __init__(self) -> None:
        self._text: bytes | None = None
        self._ids = id_array(())

    def cut(self, data: bytes) -> tuple[bytes, IdArray | None]:
        """Return two values: the JSON text of a chunk, in which null replaces the prompt's ids, and
        the ids. The ids are None if the chunk has no ids. Raises ValueError if the ids are
        malformed."""
        match = _PROMPT_IDS.search(data)
        end = -1 if match is None else data.find(b"]", match.end()) + 1
        if match is None or not end:
            return data, None
        begin = match.end() - 1
        is_repeated = self._text is not None and data.startswith(self._text, begin)
        if not is_repeated:
            self._text = data[begin:end]
            self._ids = checked_ids(orjson.loads(self._text))
        return b"%bnull%b" % (data[:begin], data[end:]), self._ids
