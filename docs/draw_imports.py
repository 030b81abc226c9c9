"""Draw which folders of the package import which, from its import statements.

    python docs/draw_imports.py > docs/imports.svg

A row has a dot for each folder that it imports. Each folder is above all that it imports, so that all dots are to the
right of the diagonal.
"""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "odc_mpi"
#: Modules at the root that import folders.
MODULES = {"api", "scripting"}
CELL, LEFT, TOP = 32, 110, 100  # pixels


def read_imports():
    """Return the folders, and those of `MODULES`, that each of them imports."""
    names = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | MODULES
    imports = {name: set() for name in names}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())) if name in names else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("odc_mpi"):
                found = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
                imports[name].update(names.intersection(found) - {name})
    return imports


def in_order(imports):
    """Return the names, each before all that it imports."""

    @cache
    def height(name):
        return 1 + max((height(each) for each in imports[name]), default=-1)

    return sorted(imports, key=lambda name: (-height(name), name))


def draw(imports):
    """Return the picture as SVG."""
    names = in_order(imports)
    size = CELL * len(names)
    parts = [f'<rect x="{LEFT}" y="{TOP}" width="{size}" height="{size}" fill="none" stroke="#8a94a6"/>']
    for i, name in enumerate(names):
        x, y = LEFT + CELL * i, TOP + CELL * i
        shade = f'<rect x="{LEFT}" y="{y}" width="{size}" height="{CELL}" fill="#eef3fb"/>' if i % 2 == 0 else ""
        parts += [
            f'{shade}<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#c9d3e6"/>',
            f'<text x="{LEFT - 8}" y="{y + 21}" text-anchor="end">{name}</text>',
            f'<text transform="translate({x + 21},{TOP - 8}) rotate(-60)">{name}</text>',
        ]
    for i, name in enumerate(names):
        for each in sorted(imports[name]):
            x, y = LEFT + CELL * (names.index(each) + 0.5), TOP + CELL * (i + 0.5)
            parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="#3d5a99"/>')
    box = f"0 0 {LEFT + size + 60} {TOP + size + 10}"
    style = 'font-family="sans-serif" font-size="15" fill="#222"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {style}>', *parts, "</svg>\n"])


if __name__ == "__main__":
    print(draw(read_imports()), end="")
