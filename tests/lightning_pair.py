"""The two scripts of docs/lightning.md, and a run of a train function in this process."""

from collections.abc import Callable
from difflib import ndiff
from pathlib import Path
from typing import Any

import torch

from undula.config.job import LoadedSpec, load_spec
from undula.driver.launch import record_job
from undula.driver.preflight import check_job, examine
from undula.storage import Store, open_store
from undula.train.single_process import SingleProcess

PAGE = Path(__file__).parents[1] / "docs" / "lightning.md"


def blocks() -> tuple[str, str, str]:
    """Return the script before, the script after, and the job, as the page shows them."""
    text = PAGE.read_text()
    before, diff, job = (text.split(f"```{kind}\n", 1)[1].split("```", 1)[0] for kind in ("python", "diff", "yaml"))
    lines = diff.splitlines(keepends=True)
    removed, added = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
    assert all(before.count(line) == 1 for line in removed)
    main, call = "".join(removed[:3]), removed[3]
    assert main in before
    return before, "".join(added[:2]) + before.replace(main, "".join(added[2:4])).replace(call, added[4]), job


def changed_lines() -> tuple[int, int]:
    """Return how many lines of the script the change takes out, and how many it adds."""
    before, after, _ = blocks()
    signs = [line[0] for line in ndiff(before.splitlines(), after.splitlines())]
    return signs.count("-"), signs.count("+")


def defined(script: str) -> dict[str, Any]:
    """Return what a script defines."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script.py", "exec"), names)
    return names


def load(folder: Path, *overrides: str) -> LoadedSpec:
    """Return the job of the page with overrides."""
    file = folder / "digits.yaml"
    file.write_text(blocks()[2])
    return load_spec(file, [f"runs={folder}", *overrides])


def train_here(train: Callable[[Any], None], loaded: LoadedSpec) -> Store:
    """Train a job in this process, and return its run directory."""
    examined = examine(train, loaded, check_job(loaded))
    store = open_store(loaded.spec.run_url)
    job = record_job(loaded, examined.plan, store, examined.script_data).job
    SingleProcess(train, job, lambda message: None, device=torch.device("cpu"))()
    return store
