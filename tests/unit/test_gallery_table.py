"""Test of the table of the gallery in the documentation."""

import re
from pathlib import Path

from adapters_kit import changed_lines

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "tests" / "gallery"


def test_the_documentation_says_how_many_lines_of_each_script_change() -> None:
    rows = re.findall(r"^\| \[(\w+)\.py\].* \| (\d+), (\d+) \|$", (ROOT / "docs" / "migrate.md").read_text(), re.M)
    stated = {name: (int(out), int(added)) for name, out, added in rows}
    counted = {}
    for before in GALLERY.glob("*_before.py"):
        name = before.name.removesuffix("_before.py")
        texts = (before.read_text(), (GALLERY / f"{name}.py").read_text())
        counted[name] = changed_lines(*(text.splitlines() for text in texts))
    assert stated == counted
