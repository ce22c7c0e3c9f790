"""Small text data set, and overrides with which the main job takes seconds on it."""

import os
from pathlib import Path

from undula.data.prepare.corpora import stdlib_text

CONTEXT = 32
PLAN = ("plan.global_batch=24", "plan.virtual_workers=6", "schedule.warmup_samples=240", "validation.samples=96")
MODEL = ("config.model.layers=2", "config.model.width=32", f"config.model.context={CONTEXT}")
ENDLESS = ("plan.epochs=1000000", "plan.max_steps=1000000000")
"""Overrides with which the job trains until it is stopped. A test that waits for something then depends on no machine's speed."""
MODULES = (
    "argparse ast base64 calendar codecs copy csv datetime difflib doctest enum "
    "ftplib inspect locale mailbox optparse os pdb pickle platform pydoc random"
)


def write_text(folder: Path, url: str | None = None) -> str:
    """Write a corpus of a few standard-library files, with several shards and row groups, and return its URL.

    Args:
        folder: Folder for the files, and for the corpus if it has no URL of its own.
        url: URL of the corpus.
    """
    url = url or str(folder / "text")
    source = folder / "source"
    source.mkdir()
    library = Path(os.__file__).parent
    for name in MODULES.split():
        (source / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    stdlib_text(context=CONTEXT, root=source).write(url, num_shards=3, row_group_bytes=16 * 1024)
    return url
