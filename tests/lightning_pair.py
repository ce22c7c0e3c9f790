"""The two scripts of docs/lightning.md, and its job."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "lightning.md"


def blocks() -> tuple[str, str, str]:
    """Return the script before, the script after, and the job, as the page shows them."""
    text = PAGE.read_text()
    before, diff, job = (text.split(f"```{kind}\n", 1)[1].split("```", 1)[0] for kind in ("python", "diff", "yaml"))
    lines = diff.splitlines(keepends=True)
    removed, added = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
    assert all(before.count(line) == 1 for line in removed)
    after = added[0] + before
    for old, new in zip(removed, added[1:], strict=True):
        after = after.replace(old, new)
    return before, after, job


def defined(script: str) -> dict[str, Any]:
    """Return what a script defines."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script.py", "exec"), names)
    return names
