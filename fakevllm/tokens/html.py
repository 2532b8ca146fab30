"""A page of tokens as one HTML file: no script, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fakevllm.tokens.colours import By, colour
from fakevllm.tokens.page import Answer, Page, Token, Turn, headed, numbers
from fakevllm.tokens.texts import Texts

STRONGEST = 0.75
"""Of a ground, so that what stands on it can be read."""
LEGEND = {
    By.ADVANTAGE: "green: made likelier; red: made less likely; dotted: not in the loss",
    By.LOGPROB: "orange: surprising to the model; dotted: not in the loss",
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


def written(page: Page, texts: Texts, by: By) -> str:
    return "".join(_parts(page, texts, by))


def _parts(page: Page, texts: Texts, by: By) -> Iterator[str]:
    yield _HEAD.format(title=escape(page.title))
    yield f"<h1>{escape(page.title)}</h1>\n"
    yield f'<p class="facts">{escape(", ".join(page.facts))}</p>\n'
    if page.question:
        yield f"<pre>{escape(page.question)}</pre>\n"
    yield "<p>coloured by "
    for way in By:
        checked = " checked" if way is by else ""
        yield f'<label><input type="radio" name="by" id="{way}"{checked}> {way}</label> '
    for way, told in LEGEND.items():
        yield f'<span class="legend of-{way}">({escape(told)})</span>'
    yield "</p>\n"
    for note in page.notes:
        yield f'<p class="notes">{escape(note)}</p>\n'
    largest = page.largest_advantage
    for answer in page.answers:
        yield from _answer(answer, texts, largest)
    yield "</body>\n</html>\n"


def _answer(answer: Answer, texts: Texts, largest: float) -> Iterator[str]:
    yield f"<h2>{escape(headed(answer))}</h2>\n"
    if not answer.turns:
        yield '<p class="notes">no tokens are known of it</p>\n'
    for turn in answer.turns:
        yield f'<p class="facts">{escape(", ".join(turn.notes))}</p>\n'
        prompt = "".join(_span(token, texts, largest) for token in turn.prompt)
        yield f"<details><summary>prompt, {len(turn.prompt)} tokens</summary>"
        yield f'<pre class="prompt">{prompt}</pre></details>\n'
        yield f"<pre>{''.join(_span(token, texts, largest) for token in turn.answer)}</pre>\n"
        yield from _table(turn, texts, largest)


def _span(token: Token, texts: Texts, largest: float) -> str:
    kinds = "t" if token.is_trained or token.logprob is None else "t out"
    return (
        f'<span class="{kinds}"{_colours(token, largest)} title="{escape(_told(token))}">'
        f"{_text(token, texts)}</span>"
    )


def _table(turn: Turn, texts: Texts, largest: float) -> Iterator[str]:
    yield f"<details><summary>table, {len(turn.answer)} tokens</summary>\n<table>\n"
    yield "<tr><th>id</th><th>text</th><th>mask</th><th>logprob</th><th>advantage</th></tr>\n"
    for token in turn.answer:
        text = _text(token, texts).replace("\n", "")
        cells = (str(token.id), None, str(int(token.is_trained)), *numbers(token))
        yield "<tr>"
        for cell in cells:
            if cell is None:
                yield f'<td><span class="t"{_colours(token, largest)}>{text}</span></td>'
            else:
                yield f"<td>{cell}</td>"
        yield "</tr>\n"
    yield "</table></details>\n"


def _told(token: Token) -> str:
    if token.logprob is None:
        return f"id {token.id}"
    logprob, advantage = numbers(token)
    mask = "in the loss" if token.is_trained else "not in the loss"
    return f"id {token.id}, logprob {logprob}, advantage {advantage}, {mask}"


def _text(token: Token, texts: Texts) -> str:
    text = texts.get(token.id)
    if text is None:
        return f"[{token.id}] "
    return escape(text).replace("\n", '<span class="end">⏎</span>\n')


def _colours(token: Token, largest: float) -> str:
    """Of each way, as variables that the page's style chooses from."""
    found = {"--a": colour(token, By.ADVANTAGE, largest), "--l": colour(token, By.LOGPROB, largest)}
    told = [
        f"{name}:rgba({','.join(map(str, one[0]))},{STRONGEST * one[1]:.2f})"
        for name, one in found.items()
        if one is not None
    ]
    return f' style="{";".join(told)}"' if told else ""
