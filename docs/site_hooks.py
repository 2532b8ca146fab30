"""Hooks of the docs site: take pages from the whole repository, and translate their links.

The Markdown pages are written for a plain repository browser: a link is a path relative to the
page's own file. MkDocs knows only the files under `docs/`. These hooks close the gap:

* Every Markdown page outside `docs/` becomes a page of the site, under its path in the repository.
* A link to another page or picture is rewritten to its place on the site.
* A link to a file that is not on the site, such as a source file, becomes the file's path as code.
* A link to a path that does not exist stays as it is, so that a strict build fails on it.

Nothing here imports MkDocs at module level, so the tests can use this file without it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs"
NO_PAGES = frozenset({"AGENTS.md", "CLAUDE.md"})
"""Instructions for coding agents, not documentation."""
NO_FOLDERS = frozenset({"docs", "site", "runs", "dist", "node_modules", "__pycache__"})

LINK_OR_CODE = re.compile(
    r"(?P<code>`[^`\n]*`)"
    r"|(?P<link>(?P<image>!?)\[(?P<text>(?:[^\[\]`\n]|`[^`\n]*`)*)\]\((?P<target>[^)\s]+)\))"
)
"""Code spans are matched first, so that a link inside one is left alone."""
FENCE = re.compile(r"^ *(```|~~~)")
LIST_ITEM = re.compile(r"(?:[*-]|\d+\.) ")
LIST_INDENT = 4
PARAGRAPH_LINE = re.compile(r"(?!(?:[*-]|\d+\.) )[^\s#|>]")
REMOTE = re.compile(r'<(?:script|img|source|link)\b[^>]* (?:src|href)="(?:https?:)?//[^"]*"')
MERMAID_SCRIPT = re.compile(r'\s*<script src="[^"]*/mermaid\.min\.js"></script>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside `docs/`."""
    from mkdocs.structure.files import File

    for path in pages_outside_docs(ROOT):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of one page from repository paths to places on the site."""
    on_site = {file.src_uri for file in files}
    path = repository_path(page.file.src_uri)
    return for_python_markdown(rewrite_links(markdown, path, on_site))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load Mermaid, which is large, only on pages that have a diagram.

    Raises PluginError if the page would fetch anything from another host.
    """
    from mkdocs.exceptions import PluginError

    if remote := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from another host: {remote[0]}")
    return output if 'class="mermaid"' in output else MERMAID_SCRIPT.sub("", output)


def pages_outside_docs(root: Path) -> Iterator[str]:
    """Return the paths of the repository's Markdown pages outside `docs/`, relative to its root."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in NO_FOLDERS and not name.startswith(".")
        )
        for name in sorted(names):
            if name.endswith(".md") and name not in NO_PAGES:
                yield Path(folder, name).relative_to(root).as_posix()


def repository_path(src_uri: str, root: Path = ROOT) -> str:
    """Return the path in the repository of a page of the site."""
    below_docs = posixpath.join(DOCS, src_uri)
    return below_docs if (root / below_docs).is_file() else src_uri


def site_path(path: str) -> str:
    """Return the place on the site of a file of the repository.

    >>> site_path("docs/job.md"), site_path("server/README.md")
    ('job.md', 'server/README.md')
    """
    return path.removeprefix(f"{DOCS}/")


def rewrite_links(markdown: str, path: str, on_site: set[str], root: Path = ROOT) -> str:
    """Return the text of the page at `path` with its links translated, fenced code untouched."""

    def translated(match: re.Match[str]) -> str:
        return match[0] if match["code"] else _translate(match, path, on_site, root)

    return "\n".join(_outside_fences(markdown, lambda line: LINK_OR_CODE.sub(translated, line)))


def for_python_markdown(markdown: str) -> str:
    """Lay out lists as Python-Markdown wants them; repository browsers speak CommonMark.

    Python-Markdown needs a blank line between a paragraph and a list, and four spaces before
    whatever belongs to a list's item.

    >>> for_python_markdown("Two kinds:\\n* one\\n\\n  more of one\\n* two")
    'Two kinds:\\n\\n* one\\n\\n    more of one\\n\\n* two'
    """
    lines: list[str] = []
    before, marker_width, in_fence, item_has_parts = "", 0, False, False
    for line in markdown.split("\n"):
        item = LIST_ITEM.match(line)
        if FENCE.match(line) and not line.startswith(" "):
            in_fence, marker_width = not in_fence, 0
        elif in_fence or not line:
            pass
        elif item:
            marker_width = len(item[0])
            if PARAGRAPH_LINE.match(before) or (item_has_parts and before):
                lines.append("")
            item_has_parts = False
        elif marker_width and line.startswith(" " * marker_width):
            line = " " * (LIST_INDENT - marker_width) + line
            item_has_parts |= not before
        elif not before:
            marker_width = 0
        lines.append(line)
        before = line
    return "\n".join(lines)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> Iterator[str]:
    """Return the lines of a page, those outside fenced code changed."""
    fenced = False
    for line in markdown.split("\n"):
        is_fence = FENCE.match(line) is not None
        yield line if fenced or is_fence else change(line)
        fenced ^= is_fence


def _translate(match: re.Match[str], path: str, on_site: set[str], root: Path) -> str:
    target, hash_sign, anchor = match["target"].partition("#")
    if not target or re.match(r"\w+:", target):
        return match[0]
    aim = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if (root / aim).is_dir() and (root / aim / "README.md").is_file():
        aim = posixpath.join(aim, "README.md")
    if site_path(aim) in on_site:
        here = posixpath.dirname(site_path(path)) or "."
        place = posixpath.relpath(site_path(aim), here)
        return f"{match['image']}[{match['text']}]({place}{hash_sign}{anchor})"
    if (root / aim).exists():
        text = match["text"].strip("`")
        return f"`{aim}`" if text in aim else f"{match['text']} (`{aim}`)"
    return match[0]
