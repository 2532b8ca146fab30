"""Write the tokens of a group or an episode as one HTML file. The file has no scripts and loads no
external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fakevllm.tokens.colours import ColourBy, colour
from fakevllm.tokens.detokenizer import TokenTexts
from fakevllm.tokens.page import CallTokens, Page, Sample, Token, format_values, heading

MAX_OPACITY = 0.55
"""Opacity of a token's background colour at full strength. At this opacity, the contrast between
text and background is at least 4.5:1 in light and dark, as WCAG demands."""
LEGEND = {
    ColourBy.ADVANTAGE: "green: made more likely; red: made less likely; dotted: not in the loss",
    ColourBy.LOGPROB: "orange: surprising to the model; dotted: not in the loss",
}
_STYLE = """
/* The colours and fonts are those of the console's pages. */
:root {
  --back: #fbfaf8; --card: #fff; --ink: #23211d; --soft: #6a655b; --line: #ddd8cd;
  --accent: #1f6f5c;
  color-scheme: light dark;
  font: 15px/1.55 system-ui, sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #1b1b19; --card: #232320; --ink: #eceae4; --soft: #aaa59a; --line: #3a3935;
    --accent: #63c2a8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
header { font-weight: 600; padding: .7rem 1.2rem; border-bottom: 1px solid var(--line); }
main { max-width: 76rem; margin: 0 auto; padding: 1.2rem; }
h1 { font-size: 1.3rem; margin: .3rem 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
label { white-space: nowrap; margin-right: .6rem; }
input { accent-color: var(--accent); }
pre { font: 13px/1.8 ui-monospace, monospace; margin: .4rem 0; padding: .6rem .8rem;
  background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .4rem 0; }
summary { cursor: pointer; }
pre .end { font-size: .85em; }
.facts, .notes, summary, .legend, .prompt, th { color: var(--soft); }
.out { border-bottom: 2px dotted var(--soft); }
.t { border-radius: 3px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; }
th, td { text-align: right; padding: .2rem .7rem; white-space: pre;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
body:has(#advantage:checked) .t { background: var(--a); }
body:has(#logprob:checked) .t { background: var(--l); }
body:has(#advantage:checked) .of-logprob,
body:has(#logprob:checked) .of-advantage { display: none; }
@media (max-width: 640px) {
  header { padding: .6rem .9rem; }
  main { padding: .9rem; }
  th, td { padding: .2rem .4rem; }
}
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · fakevllm</title>
<style>{style}</style>
</head>
<body>
<header>fakevllm</header>
<main>
"""


def render_html(page: Page, texts: TokenTexts, by: ColourBy) -> str:
    """Return the page of tokens as HTML. `by` decides whether the colours show advantages or
    log-probabilities when the page is opened. The person who reads the page can switch between the
    two."""
    return "".join(_parts(page, texts, by))


def _parts(page: Page, texts: TokenTexts, by: ColourBy) -> Iterator[str]:
    yield _HEAD.format(title=escape(page.title), style=_STYLE)
    yield f"<h1>{escape(page.title)}</h1>\n"
    yield f'<p class="facts">{escape(", ".join(page.facts))}</p>\n'
    if page.question:
        yield f"<pre>{escape(page.question)}</pre>\n"
    yield "<p>Coloured by "
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
    yield "</main>\n</body>\n</html>\n"


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
    yield f"<details><summary>table, {len(call.response)} tokens</summary>\n"
    yield '<div class="wide" tabindex="0">\n<table>\n'
    yield "<tr><th>id</th><th>text</th><th>mask</th><th>logprob</th><th>advantage</th></tr>\n"
    for token in call.response:
        text = _text(token, texts).replace("\n", "")
        logprob, advantage = format_values(token)
        yield (
            f"<tr><td>{token.id}</td>"
            f'<td><span class="t"{_style(token, largest)}>{text}</span></td>'
            f"<td>{int(token.is_trained)}</td><td>{logprob}</td><td>{advantage}</td></tr>\n"
        )
    yield "</table>\n</div></details>\n"


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
