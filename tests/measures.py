"""The weight of the library in figures, as docs/architecture.md shows them: `python tests/measures.py`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rings import BUDGETS, PACKAGE, SATELLITES, code_lines, ring_of, taken_names

COUNT = "import sys, undula.train.run; print(sum(name.split('.')[0] == 'undula' for name in sys.modules))"
"""Program that prints how many modules of the library a process has that trains."""


def main() -> None:
    """Print the measures."""
    names = {_module(path): path for path in PACKAGE.rglob("*.py")}
    taken: set[tuple[str, str]] = set()
    lines = dict.fromkeys(BUDGETS, 0)
    for module, path in names.items():
        lines[ring_of(module)] += code_lines(path.read_text())
        own = (
            ring_of(module) if module != "undula" else "package"
        )  # which only names what it looks up when that is used
        taken |= {(own, f"{owner}.{name}") for owner, name in taken_names(ast.parse(path.read_text()))}
    ring = {name: ring_of(name if name in names else name.rpartition(".")[0]) for _, name in taken}
    upwards = {name for own, name in taken if own == "core" != ring[name]}
    contract = {name for own, name in taken if own in SATELLITES and ring[name] == "core"}
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    print(f"names that the core takes from satellites: {len(upwards)}")
    print(f"names that satellites take from the core: {len(contract)}")
    print(f"lines of code: {sum(lines.values()):,}, {lines['core']:,} of them in the core")
    print(f"modules of a training process: {done.stdout.strip()}")
    print(*_table(lines), sep="\n")


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _table(lines: dict[str, int]) -> Iterator[str]:
    for ring, count in sorted(lines.items(), key=lambda item: -item[1]):
        yield f"  {ring:12} {count:6,} of {BUDGETS[ring]:,}"


if __name__ == "__main__":
    main()
