"""Write the tokens of a group or an episode as one HTML file. The file has no scripts and loads no
external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fakevllm.tokens.colours import ColourBy, colour
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.page import CallTokens, Page, Sample, Token, format_values, heading

MAX_OPACITY = 0.75
"""Opacity of a token's background colour at full strength. At this opacity, the text is still
readable."""
LEGEND = {
    ColourBy.ADVANTAGE: "green: made more likely; red: made less likely; dotted: not in the loss",
    ColourBy.LOGPROB: "orange: surprising to the model; dotted: not in the loss",
}
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.1rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1rem; margin: 2rem 0 0.3rem; border-top: 1px solid #8885; padding-top: 0.8rem; }}
pre {{ font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 0.3rem 0; }}
.facts, .notes, summary, .legend {{ opacity: 0.75; }}
.prompt {{ opacity: 0.6; }}
.out {{ border-bottom: 2px dotted #8889; }}
span {{ border-radius: 3px; }}
.end {{ opacity: 0.5; }}
table {{ border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; }}
th, td {{ text-align: right; padding: 0 0.8rem; white-space: pre; }}
th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
body:has(#advantage:checked) .t {{ background: var(--a); }}
body:has(#logprob:checked) .t {{ background: var(--l); }}
body:has(#advantage:checked) .of-logprob,
body:has(#logprob:checked) .of-advantage {{ display: none; }}
</style>
</head>
<body>
"""


def render_html(page: Page, texts: TokenTexts, by: ColourBy) -> str:
    """Return the page of tokens as HTML. `by` decides whether the colours show advantages or
    log-probabilities when the page is opened. The person who reads the page can switch between the
    two."""
    return "".join(_parts(page, texts, by))


def _parts(page: Page, texts: TokenTexts, by: ColourBy) -> Iterator[str]:
    yield _HEAD.format(title=escape(page.title))
    yield f"<h1>{escape(page.title)}</h1>\n"
    yield f'<p class="facts">{escape(", ".join(page.facts))}</p>\n'
    if page.question:
        yield f"<pre>{escape(page.question)}</pre>\n"
    yield "<p>coloured by "
    for choice in ColourBy:
        checked = " checked" if choice is by else ""
        yield f'<label><input type="radio" name="by" id="{choice}"{checked}> {choice}</label> '
    for choice, legend in LEGEND.items():
        yield f'<span class="legend of-{choice}">({escape(legend)})</span>'
    yield "</p>\n"
    for note in page.notes:
        yield f'<p class="notes">{escape(note)}</p>\n'
    largest = page.largest_advantage
    for sample in page.samples:
        yield from _sample(sample, texts, largest)
    yield "</body>\n</html>\n"


def _sample(sample: Sample, texts: TokenTexts, largest: float) -> Iterator[str]:
    yield f"<h2>{escape(heading(sample))}</h2>\n"
    if not sample.calls:
        yield '<p class="notes">no tokens are recorded</p>\n'
    for call in sample.calls:
        yield f'<p class="facts">{escape(", ".join(call.notes))}</p>\n'
        prompt = "".join(_span(token, texts, largest) for token in call.prompt)
        yield f"<details><summary>prompt, {len(call.prompt)} tokens</summary>"
        yield f'<pre class="prompt">{prompt}</pre></details>\n'
        yield f"<pre>{''.join(_span(token, texts, largest) for token in call.response)}</pre>\n"
        yield from _table(call, texts, largest)


def _span(token: Token, texts: TokenTexts, largest: float) -> str:
    classes = "t" if token.is_trained or token.logprob is None else "t out"
    return (
        f'<span class="{classes}"{_style(token, largest)} title="{escape(_tooltip(token))}">'
        f"{_text(token, texts)}</span>"
    )


def _table(call: CallTokens, texts: TokenTexts, largest: float) -> Iterator[str]:
    yield f"<details><summary>table, {len(call.response)} tokens</summary>\n<table>\n"
    yield "<tr><th>id</th><th>text</th><th>mask</th><th>logprob</th><th>advantage</th></tr>\n"
    for token in call.response:
        text = _text(token, texts).replace("\n", "")
        logprob, advantage = format_values(token)
        yield (
            f"<tr><td>{token.id}</td>"
            f'<td><span class="t"{_style(token, largest)}>{text}</span></td>'
            f"<td>{int(token.is_trained)}</td><td>{logprob}</td><td>{advantage}</td></tr>\n"
        )
    yield "</table></details>\n"


def _tooltip(token: Token) -> str:
    if token.logprob is None:
        return f"id {token.id}"
    logprob, advantage = format_values(token)
    mask = "in the loss" if token.is_trained else "not in the loss"
    return f"id {token.id}, logprob {logprob}, advantage {advantage}, {mask}"


def _text(token: Token, texts: TokenTexts) -> str:
    text = texts.get(token.id)
    if text is None:
        return f"[{token.id}] "
    return escape(text).replace("\n", '<span class="end">⏎</span>\n')


def _style(token: Token, largest: float) -> str:
    """Return a style attribute with two CSS variables: the token's colour by advantage, and its
    colour by log-probability. The page's style sheet selects one of the two."""
    colours = {
        "--a": colour(token, ColourBy.ADVANTAGE, largest),
        "--l": colour(token, ColourBy.LOGPROB, largest),
    }
    variables: list[str] = []
    for name, token_colour in colours.items():
        if token_colour is not None:
            rgb, strength = token_colour
            channels = ",".join(map(str, rgb))
            variables.append(f"{name}:rgba({channels},{MAX_OPACITY * strength:.2f})")
    return f' style="{";".join(variables)}"' if variables else ""
