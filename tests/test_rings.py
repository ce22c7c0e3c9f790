"""Tests that the core of the library needs no satellite, and that satellites take from it what one list says."""

import ast
from functools import cache
from pathlib import Path

import pytest
from rings import BUDGETS, SATELLITES, code_lines, ring_of, taken_names
from test_architecture import NAMES

CONTRACT = Path(__file__).parent / "contract.txt"
MOST_NAMES = 392
"""Maximum number of names in the contract, which gets smaller and never larger."""


@cache
def taken() -> frozenset[tuple[str, str]]:
    """Return each module with each name of the library that it imports, as `undula.package.module.name`."""
    trees = {module: ast.parse(path.read_text()) for module, path in NAMES.items()}
    return frozenset((module, f"{owner}.{name}") for module, tree in trees.items() for owner, name in taken_names(tree))


def ring_of_name(name: str) -> str:
    return ring_of(name if name in NAMES else name.rpartition(".")[0])


def test_the_core_takes_nothing_from_satellites() -> None:
    """The package itself only names what it looks up when that is used."""
    found = {(module, name) for module, name in taken() if ring_of(module) == "core" != ring_of_name(name)}
    assert sorted(each for each in found if each[0] != "undula") == [], "the core must not need a satellite"


def test_satellites_take_from_the_core_only_what_the_contract_lists() -> None:
    found = {name for module, name in taken() if ring_of(module) != "core" == ring_of_name(name)}
    listed = CONTRACT.read_text().split()
    assert listed == sorted(set(listed))
    assert sorted(found - {*listed}) == [], "use what the contract has, or take up the matter with the core"
    assert sorted({*listed} - found) == [], "no satellite takes these any more; remove them from the contract"
    assert len(listed) <= MOST_NAMES


@pytest.mark.parametrize("ring", BUDGETS)
def test_a_ring_keeps_its_budget_of_code(ring: str) -> None:
    lines = sum(code_lines(path.read_text()) for module, path in NAMES.items() if ring_of(module) == ring)
    assert lines <= BUDGETS[ring], f"{ring} has {lines} lines of code"


def test_every_satellite_has_a_budget_and_every_entry_is_a_module() -> None:
    assert set(BUDGETS) == {*SATELLITES, "core"}
    modules = {name.removeprefix("undula.") for name in NAMES}
    assert [part for owned in SATELLITES.values() for part in owned if part not in modules] == []


def test_code_is_counted_without_docstrings_and_comments() -> None:
    source = '"""A module."""\n\nx = (  # a number\n    1\n)\n"""It is small."""\n\n\n'
    source += 'def f():\n    """Do nothing."""\n    return """a\nb"""\n'
    assert code_lines(source) == 6
