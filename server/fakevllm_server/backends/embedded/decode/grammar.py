"""Grammars that constrain an answer, for example to a JSON schema or a regular expression. The
library xgrammar compiles and applies the grammars.

xgrammar is imported by the first request that has a grammar. Before the answer begins, a fast check
finds invalid grammars. Compiling a grammar is slow for a large vocabulary. Therefore the
compilation runs in a worker thread and does not block the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fakevllm_adapters.protocol.errors import WireError, bad_request
from fakevllm_adapters.vllm_compat.grammar import Grammar

MAX_CHECKED_GRAMMARS = 256
"""Number of grammars that are remembered as valid. The requests of a group, and retries of a
request, use the same grammar within seconds."""
CACHE_BYTES = 64 << 20
"""Size of the cache of compiled grammars."""
MAX_CHARACTERS = 200_000
MAX_DEPTH = 100
"""Maximum depth of nested JSON. The time that xgrammar needs grows with the cube of the depth. At
the maximum depth, it needs about half a second."""
MAX_WHITESPACE = 13
"""Maximum number of consecutive white-space characters between the parts of a JSON text. This
number allows a line break and an indent of six levels of two spaces, or of three levels of four
spaces. Without a bound, as in vLLM, a small model may write only white space until its token limit.
Structural tags have no bound, because xgrammar does not support a bound for structural tags."""
COMPILE_TIMEOUT_S = 30.0
WORD_BITS = 32
_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""Prefix of xgrammar's error texts: the place in its source."""


class GrammarCompiler:
    """Checks and compiles grammars for one tokenizer. Several threads may use one compiler."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiler: Any = None
        self._checked: OrderedDict[Grammar, None] = OrderedDict()
        self._checked_lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Check that a grammar (a constraint on an answer) is valid. Raises WireError (400) with
        the error message of vLLM."""
        with self._checked_lock:
            is_checked = grammar in self._checked
        if is_checked:
            return
        _check(grammar)
        with self._checked_lock:
            self._checked[grammar] = None
            if len(self._checked) > MAX_CHECKED_GRAMMARS:
                self._checked.popitem(last=False)

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Compile a grammar, and return a new matcher for one request. Raises WireError (400) if
        the grammar cannot be compiled within COMPILE_TIMEOUT_S seconds."""
        import xgrammar

        self.check(grammar)
        compiling = asyncio.to_thread(self._compiled, grammar)
        try:
            compiled = await asyncio.wait_for(compiling, COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise bad_request(
                f"The grammar took longer than {COMPILE_TIMEOUT_S:.0f} s to compile: make it "
                "smaller."
            ) from None
        except RuntimeError as error:
            raise bad_request(f"Invalid grammar specification. {_reason(error)}") from None
        return GrammarMatcher(xgrammar.GrammarMatcher(compiled), self._vocab_size)

    def _compiled(self, grammar: Grammar) -> Any:
        compiler = self._ready_compiler()
        match grammar.kind:
            case "json" | "calls" | "arguments":
                return compiler.compile_json_schema(grammar.text, **_whitespace(grammar))
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "structural_tag":
                return compiler.compile_grammar(_structural_tag(grammar.text))
            case "choice" | "ebnf":
                return compiler.compile_grammar(_ebnf(grammar))

    def _ready_compiler(self) -> Any:
        """Return xgrammar's compiler. The first call creates it. If two threads create a compiler
        at the same time, the second compiler is kept, which does no harm."""
        if self._compiler is None:
            import xgrammar

            vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer,
                vocab_size=self._vocab_size,
                stop_token_ids=sorted(self._eos_ids),
            )
            self._compiler = xgrammar.GrammarCompiler(
                vocabulary, max_threads=os.cpu_count() or 1, cache_limit_bytes=CACHE_BYTES
            )
        return self._compiler


class GrammarMatcher:
    """The position of one request in the grammar that constrains its answer. The position
    determines the tokens that may follow. Use a matcher on the engine thread only."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = torch.full((-(-vocab_size // WORD_BITS),), -1, dtype=torch.int32)
        self._is_over = False

    def allowed(self) -> Tensor | None:
        """Return a mask, [vocabulary] of bool, that is True for each token that the grammar allows
        next. Return None if every token is allowed."""
        if self._is_over or not self._matcher.fill_next_token_bitmask(self._words[None]):
            return None
        bits = self._words[:, None] >> torch.arange(WORD_BITS, dtype=torch.int32)
        return (bits & 1).flatten()[: self._vocab_size].bool()

    def take(self, token_id: int) -> None:
        if self._is_over:
            return
        accepted = self._matcher.accept_token(token_id)
        self._is_over = not accepted or self._matcher.is_terminated()


def _check(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_CHARACTERS:
        raise bad_request(
            f"The grammar has {len(grammar.text)} characters: this engine takes at most "
            f"{MAX_CHARACTERS}."
        )
    import xgrammar

    try:
        match grammar.kind:
            case "json" | "calls" | "arguments":
                _check_schema(grammar)
                xgrammar.Grammar.from_json_schema(grammar.text, **_whitespace(grammar))
            case "regex":
                xgrammar.Grammar.from_regex(grammar.text)
            case "structural_tag":
                _structural_tag(grammar.text)
            case "choice" | "ebnf":
                xgrammar.Grammar.from_ebnf(_ebnf(grammar))
    # xgrammar raises RuntimeError; its Python parts raise the others for malformed JSON.
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise _refusal(grammar, _reason(error)) from None


def _refusal(grammar: Grammar, reason: str) -> WireError:
    match grammar.kind:
        case "json" | "calls" | "arguments":
            return bad_request(f"Failed to transform json schema into a grammar: {reason}")
        case "regex":
            return bad_request(f"Failed to transform regex into a grammar: {reason}")
        case "choice":
            return bad_request(f"Failed to transform choices into a grammar: {reason}")
        case "structural_tag":
            return bad_request(f"Invalid structural tag specification. {reason}")
        case "ebnf":
            return bad_request(f"Invalid grammar specification. {reason}")


def _check_schema(grammar: Grammar) -> None:
    """Check a JSON schema. Raises ValueError if the schema is nested deeper than MAX_DEPTH, because
    compiling would take too long. For a grammar of kind `json`, a keyword that xgrammar ignores
    raises WireError (400). Schemas of tool parameters may contain such keywords."""
    schema: Any = json.loads(grammar.text)
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if grammar.kind == "json" and any(map(_is_unsupported, level)):
            raise bad_request(
                "The provided JSON schema contains features not supported by xgrammar."
            )
        level = [inner for value in level for inner in _inner(value)]


def _inner(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [each for each in inner if isinstance(each, dict | list)]


def _is_unsupported(schema: Any) -> bool:
    """Return True if `schema` describes an array and has a keyword that xgrammar ignores. Nested
    schemas are not searched."""
    unsupported = ("uniqueItems", "contains", "minContains", "maxContains")
    is_array = isinstance(schema, dict) and schema.get("type") == "array"
    return is_array and any(schema.get(key) for key in unsupported)


def _whitespace(grammar: Grammar) -> dict[str, Any]:
    if grammar.any_whitespace:
        return {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE}
    return {"any_whitespace": False}


def _ebnf(grammar: Grammar) -> str:
    if grammar.kind == "choice":
        choices: list[str] = json.loads(grammar.text)
        # EBNF has the same escapes as JSON, except for halves of a surrogate pair.
        return "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    if "::=" not in grammar.text:
        raise ValueError("This engine reads EBNF (`root ::= …`), not Lark.")
    return grammar.text


def _structural_tag(text: str) -> Any:
    """Compile a structural tag to a grammar. `text` is the JSON of the tag. The JSON object has
    either the keys `structures` and `triggers`, or the key `format`."""
    import xgrammar

    tag = json.loads(text)
    if "structures" not in tag:
        return xgrammar.Grammar.from_structural_tag(text)
    items = [
        xgrammar.StructuralTagItem(
            begin=each["begin"], schema=json.dumps(each.get("schema") or {}), end=each["end"]
        )
        for each in tag["structures"]
    ]
    return xgrammar.Grammar.from_structural_tag(items, tag["triggers"])


def _reason(error: Exception) -> str:
    return _IN_XGRAMMAR.sub("", str(error)).strip()
