"""Draw the graph of folders from the imports of each package, and fail on a cycle.

A folder stands for everything below it, so `fakevllm/web/routes` counts as `fakevllm/web`. A module
at the top of a package is a node of its own. Imports inside functions and below `TYPE_CHECKING`
count.

    python .ci/folder_graph.py [--dot]
"""

from __future__ import annotations

import argparse
import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "fakevllm": ROOT / "fakevllm",
    "fakevllm_server": ROOT / "server/fakevllm_server",
    "fakevllm_adapters": ROOT / "adapters/fakevllm_adapters",
    "fakevllm_runtime": ROOT / "adapters/fakevllm_runtime",
}
ENTRY_POINTS = ("__init__", "__main__")
"""Modules that forward to the rest of their package, and that nothing in it imports."""

Graph = dict[str, set[str]]


def graph_of(package: str, folder: Path) -> Graph:
    """Return the folders that each folder of `package` imports."""
    graph: Graph = {}
    for module in sorted(folder.rglob("*.py")):
        parts = module.relative_to(folder).with_suffix("").parts
        if parts[0] in ENTRY_POINTS:
            continue
        node = parts[0]
        imported = {name.split(".")[1] for name in imports_of(module, package)}
        graph.setdefault(node, set()).update(imported - {node})
    return {node: needs & graph.keys() for node, needs in graph.items()}


def imports_of(module: Path, package: str) -> set[str]:
    """Return the dotted names below `package` that `module` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            names.update(f"{package}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.startswith(f"{package}.")}


def layers_of(graph: Graph) -> list[list[str]]:
    """Return the folders in layers from the bottom. Raises CycleError."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    layers: list[list[str]] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        layers.append(ready)
        sorter.done(*ready)
    return layers


def drawing(package: str, graph: Graph, as_dot: bool) -> str:
    if as_dot:
        edges = [
            f'  "{node}" -> "{need}";' for node in sorted(graph) for need in sorted(graph[node])
        ]
        return "\n".join([f"digraph {package} {{", *edges, "}"])
    lines = [f"{package}: folders in layers, from the bottom"]
    for number, layer in enumerate(layers_of(graph)):
        for node in layer:
            lines.append(f"  {number}  {node:<14} {' '.join(sorted(graph[node]))}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the folders' graph; exit 1 on a cycle.")
    parser.add_argument("--dot", action="store_true", help="print Graphviz source instead")
    as_dot: bool = parser.parse_args().dot
    for package, folder in PACKAGES.items():
        try:
            print(drawing(package, graph_of(package, folder), as_dot))
        except CycleError as error:
            sys.exit(f"{package}: the folders import each other: {' -> '.join(error.args[1])}")


if __name__ == "__main__":
    main()
