"""Units of a model: its repeated blocks, or the modules that a job names. Activations are kept and freed by units."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential)


def units_of(module: nn.Module, names: Literal["auto"] | Sequence[str]) -> dict[str, nn.Module]:
    """Return the units of a module by name, in the module's order.

    Args:
        module: The module.
        names: Names of modules, in which each part between two dots may be a pattern, such as `encoder.*`; or `auto` for the blocks of
            the longest ModuleList or Sequential of modules of one class, and for those of all others of this class alone.

    Returns:
        The units. A module inside another unit is not a unit of its own.
    """
    matches = _repeated(module) if names == "auto" else _named(module, names)
    units: dict[str, nn.Module] = {}
    for name, unit in matches.items():
        if not any(name.startswith(f"{outer}.") for outer in units):
            units[name] = unit
    return units


def problem_of_units(
    module: nn.Module, names: Literal["auto"] | Sequence[str], key: str = "activations.units"
) -> str | None:
    """Return the reason why a job's units, of the setting `key`, do not fit its model, as a sentence; None if they fit."""
    if names == "auto":
        if units_of(module, names):
            return None
        return (
            f"{key}=auto found no repeated blocks in the model, which are two or more modules of one class in a ModuleList or "
            f"Sequential; name the units, for example {key}=[encoder.*]"
        )
    for name in names:
        if not _named(module, [name]):
            known = [child for child, _ in module.named_children()]
            return (
                f"{key} has {name!r}, which matches no module of the model; its modules are {', '.join(known) or 'none'} and "
                "the modules inside them, such as encoder.0 or, as a pattern, encoder.*"
            )
    return None


def _named(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    return {
        name: layer
        for name, layer in module.named_modules()
        if name and any(_matches(name.split("."), pattern.split(".")) for pattern in patterns)
    }


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    rows = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, CONTAINERS) and len(layer) > 1 and len({type(child) for child in layer}) == 1
    }
    if not rows:
        return {}
    # A row of rows, such as the stages of a residual network, has no blocks itself.
    longest = max(rows.values(), key=lambda row: (not isinstance(row[0], CONTAINERS), len(row)))
    kind = type(longest[0])
    blocks = {id(child) for row in rows.values() for child in row if type(child) is kind}
    return {name: layer for name, layer in module.named_modules() if id(layer) in blocks}
