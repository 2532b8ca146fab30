"""A drawing of the history: one panel per figure, one line per machine, oldest version on the left.

The drawing is an SVG without scripts or links, so that it needs no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.track_parts.history import Entry

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 720, 110, 16, 110, 30, 16
COLOURS = ("#3f51b5", "#d9480f", "#2b8a3e", "#862e9c", "#5c940d")
_STYLE = "font-family:sans-serif;font-size:12px"


def draw(history: Sequence[Entry]) -> str:
    """Return the SVG of all figures."""
    names = list(dict.fromkeys(entry.figure for entry in history))
    machines = list(dict.fromkeys(_series(entry) for entry in history))
    height = PANEL * len(names) + TOP + 18 * len(machines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" style="{_STYLE}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(names):
        entries = [entry for entry in history if entry.figure == name]
        parts += _panel(entries, machines, PANEL * number)
    for number, machine in enumerate(machines):
        y = PANEL * len(names) + TOP + 18 * number
        parts.append(
            f'<circle cx="{LEFT}" cy="{y - 4}" r="4" fill="{_colour(machines, machine)}"/>'
        )
        parts.append(f'<text x="{LEFT + 12}" y="{y}">{escape(machine)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(entries: Sequence[Entry], machines: Sequence[str], top: int) -> list[str]:
    """Return the elements of one figure. The scale begins at 0."""
    first = entries[0]
    highest = max(entry.ratio for entry in entries) or 1.0
    commits = list(dict.fromkeys(entry.commit for entry in entries))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(commits) - 1)

    def point(entry: Entry) -> tuple[float, float]:
        x = LEFT + step * commits.index(entry.commit)
        return x, top + PANEL - BOTTOM - (PANEL - TOP - BOTTOM) * entry.ratio / highest

    bottom = top + PANEL - BOTTOM
    title = f"{first.figure} (times {first.floor}; {first.better} is better)"
    parts = [
        f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{escape(title)}</text>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#adb5bd"/>',
    ]
    for machine in machines:
        own = [entry for entry in entries if _series(entry) == machine]
        if not own:
            continue
        colour = _colour(machines, machine)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(point, own))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for entry in own:
            x, y = point(entry)
            label = escape(f"{entry.commit}, {entry.at}: {entry.ratio:.3g}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{label}</title>'
                "</circle>"
            )
        x, y = point(own[-1])
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{own[-1].ratio:.3g}</text>')
    return parts


def _series(entry: Entry) -> str:
    return f"{entry.machine}{', short measurement' if entry.is_quick else ''}"


def _colour(machines: Sequence[str], machine: str) -> str:
    return COLOURS[machines.index(machine) % len(COLOURS)]
