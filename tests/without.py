"""Program that runs code as if the folders of some satellites were deleted: python without.py SATELLITE,... CODE."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

from rings import ring_of


class Deleted(MetaPathFinder):
    """Finder that says that the modules of some satellites do not exist."""

    def __init__(self, satellites: set[str]):
        self._satellites = satellites

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith("undula.") and ring_of(fullname) in self._satellites:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if __name__ == "__main__":
    satellites, code = sys.argv[1:]
    sys.meta_path.insert(0, Deleted(set(satellites.split(","))))
    exec(code)
