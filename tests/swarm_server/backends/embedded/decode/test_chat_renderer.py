from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.backends.embedded.decode.chat_renderer import MAX_CACHED_PROMPTS, ChatRenderer
from fakevllm_server.backends.embedded.decode.vocabulary import longest_token_bytes
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


@pytest.fixture
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer, "demo", 512, 6000)


def text_of(renderer: ChatRenderer, tokenizer: Any, **body: Any) -> str:
    return tokenizer.decode(renderer.render(ChatRequest(**body)))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "text", "text": None}], ""),
        ("\ud800 lone", "? lone"),
        ("🦆 ünï\u0000", "🦆 ünï\u0000"),
    ],
)
def test_any_text_content_is_rendered(
    renderer: ChatRenderer, tokenizer: Any, content: Any, rendered: str
) -> None:
    text = text_of(renderer, tokenizer, messages=[user(content)])

    assert text == f"<|im_start|>user\n{rendered}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            "demo is not a multimodal model",
        ),
        (user([{"type": "input_audio"}]), "demo is not a multimodal model"),
        (user([{"type": "hologram"}]), "Unknown part type: hologram"),
        (user([7]), "Unknown part type: None"),
        (user(7), "`content` must be a string or a list of parts."),
        ({"content": "x"}, "Each message must have a `role`."),
    ],
)
def test_content_that_is_not_text_is_a_400(
    renderer: ChatRenderer, message: dict[str, Any], reason: str
) -> None:
    with pytest.raises(WireError) as caught:
        renderer.render(ChatRequest(messages=[message]))

    assert (caught.value.status, caught.value.message) == (400, reason)


def test_a_conversation_that_the_template_refuses_is_a_400_with_the_reason(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(WireError, match=r"400.*roles must alternate"):
        ChatRenderer(tokenizer, "demo", 512, 6000).render(ChatRequest(messages=[user("x")]))


def test_a_request_cannot_set_the_template(renderer: ChatRenderer) -> None:
    body: dict[str, Any] = {
        "messages": [user("x")],
        "chat_template_kwargs": {"chat_template": "{{ 1 }}"},
    }

    with pytest.raises(WireError, match="chat_template"):
        renderer.render(ChatRequest(**body))


def test_template_kwargs_reach_the_template_and_distinguish_prompts(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ 'think' if enable_thinking else 'answer' }}"
    renderer = ChatRenderer(tokenizer, "demo", 512, 6000)

    texts = [
        text_of(
            renderer, tokenizer, messages=[user("x")], chat_template_kwargs={"enable_thinking": on}
        )
        for on in (True, False)
    ]

    assert texts == ["think", "answer"]


def test_tools_and_their_calls_are_rendered_with_arguments_as_json(
    renderer: ChatRenderer, tokenizer: Any
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = text_of(
        renderer,
        tokenizer,
        messages=[
            {"role": "system", "content": "Be brief."},
            user("1+1?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "3"}]},
        ],
        tools=[TOOL],
    )

    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n{"
    )
    assert '"name": "add"' in text and text.count("Be brief.") == 1
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_that_are_not_json_are_rendered_unchanged(
    renderer: ChatRenderer, tokenizer: Any
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    assert '"arguments": {"a": }' in text_of(renderer, tokenizer, messages=messages)


def test_an_unknown_role_is_rendered_under_its_name(renderer: ChatRenderer, tokenizer: Any) -> None:
    text = text_of(renderer, tokenizer, messages=[{"role": "developer", "content": "Be kind."}])

    assert text.startswith("<|im_start|>developer\nBe kind.<|im_end|>\n")


def test_siblings_are_rendered_once_and_old_prompts_are_forgotten(tokenizer: Any) -> None:
    rendered: list[str] = []

    class Counting:
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            rendered.append(messages[0]["content"])
            return messages[0]["content"]

        def encode(self, text: str, **options: Any) -> list[int]:
            return tokenizer.encode(text, **options)

    renderer = ChatRenderer(Counting(), "demo", 512, 6000)
    for _ in range(3):
        renderer.render(ChatRequest(messages=[user("first")]))[0] = -1
    assert rendered == ["first"]

    for index in range(MAX_CACHED_PROMPTS):
        renderer.render(ChatRequest(messages=[user(str(index))]))
    assert -1 not in renderer.render(ChatRequest(messages=[user("first")]))
    assert rendered.count("first") == 2


def test_a_text_that_cannot_fit_in_the_context_is_refused_before_it_is_tokenized(
    tokenizer: Any,
) -> None:
    class Untokenizing:
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            return tokenizer.apply_chat_template(messages, **options)

    renderer = ChatRenderer(Untokenizing(), "demo", 512, 6000)
    with pytest.raises(WireError) as refused:
        renderer.render(ChatRequest(messages=[user("é" * 3000)]))
    assert refused.value.status == 400
    assert "maximum context length is 512 tokens" in refused.value.body["error"]["message"]
    assert "more than 6000 bytes" in refused.value.body["error"]["message"]


@pytest.mark.parametrize(("side", "is_kept"), [("left", "end"), ("right", "begin"), (None, "end")])
def test_a_text_that_is_to_be_truncated_is_cut_before_it_is_tokenized(
    tokenizer: Any, side: str | None, is_kept: str
) -> None:
    tokenized: list[str] = []

    class Recording:
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
            return messages[0]["content"]

        def encode(self, text: str, **options: Any) -> list[int]:
            tokenized.append(text)
            return tokenizer.encode(text, **options)

    renderer = ChatRenderer(Recording(), "demo", 512, 6000)
    text = "begin" + "é" * 10000 + "end"
    renderer.render(
        ChatRequest(messages=[user(text)], truncate_prompt_tokens=8, truncation_side=side)
    )
    (cut,) = tokenized
    assert 5990 < len(cut.encode()) <= 6000
    assert cut.startswith("begin") == (is_kept == "begin")
    assert cut.endswith("end") == (is_kept == "end")


def test_no_token_stands_for_more_bytes_than_the_longest_token(tokenizer: Any) -> None:
    most = longest_token_bytes(tokenizer)
    for text in ("the quick brown fox " * 50, "é" * 500, "日本語" * 100, " " * 500):
        assert len(text.encode()) <= most * len(tokenizer.encode(text, add_special_tokens=False))
