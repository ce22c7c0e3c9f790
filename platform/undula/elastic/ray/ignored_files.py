"""Files of a folder that Ray does not send to a cluster because a `.gitignore` names them."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ray._private import ray_constants
from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

SENDS_ALL = ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE
"""Environment variable that is 1 if Ray shall send what a `.gitignore` names."""
CACHE = "CACHEDIR.TAG"
"""File in a folder that a program can make again (https://bford.info/cachedir)."""
_log = logging.getLogger(__name__)
_Rules = Sequence[Callable[[Path], bool]]


def ignored_by_git(folder: Path, excludes: Sequence[str]) -> list[str]:
    """Return the paths in a folder, relative to it, that are not sent because a `.gitignore` names them, without caches.

    A folder of which nothing is sent counts as one. What `.rayignore` or `excludes` names is not among them, since it was meant for Ray.
    """
    if os.environ.get(SENDS_ALL) == "1":
        return []
    meant = [_get_excludes(folder, [*ray_constants.get_runtime_env_default_excludes(), *excludes])]
    with suppress(OSError):  # which Ray reports when it packs the folder
        return [str(path.relative_to(folder)) for path in _ignored(folder, (), meant)]
    return []


def _ignored(place: Path, ignores: _Rules, meant: _Rules) -> list[Path]:
    meant = [*meant, *get_excludes_from_ignore_files(place, include_gitignore=False, logger=_log)]
    ignores = [*ignores, *get_excludes_from_ignore_files(place, include_gitignore=True, logger=_log)]
    found, is_whole = [], True
    for path in sorted(place.iterdir()):
        if any(rule(path) for rule in meant) or (path / CACHE).exists():
            continue
        if any(rule(path) for rule in ignores):
            found.append(path)
        else:  # a pattern such as `data/` fits what is in the folder, and not the folder
            below = _ignored(path, ignores, meant) if path.is_dir() else []
            found += below
            is_whole &= below == [path]
    return [place] if found and is_whole else found
