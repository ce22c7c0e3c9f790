"""Tests of the architecture: dependencies point one way, and the README names only existing paths."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import private_names
import pytest
from rings import ring_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "undula"

LAYERS = (
    ("errors",),
    ("extensions", "masking"),
    ("storage",),
    ("plan",),
    ("data", "state"),
    ("optim", "parallel", "telemetry"),
    ("recovery",),
    ("train",),
    ("elastic",),
    ("config", "report"),
    ("cluster",),
    ("driver",),
    ("study", "testing"),
    ("entry",),
    ("cli", "adapters"),
    ("__init__",),
)
"""Layers of packages and modules, lowest first. A layer may only import lower layers."""
FLOOR = ("errors", "extensions")
"""Modules that every package may use."""
MOST_EDGES = 74
"""Maximum number of pairs of packages of which one imports the other from modules of the core, without the modules of the floor."""
LIBRARIES = {  # library -> packages that may import it
    "ray": {"data", "recovery", "telemetry", "elastic", "cluster", "driver", "study", "testing"},
    "torch": {
        "data",
        "state",
        "optim",
        "parallel",
        "recovery",
        "train",
        "elastic",
        "cluster",
        "driver",
        "study",
        "testing",
        "adapters",
    },
    "boto3": {"storage", "cluster"},
}
PURE = (
    "plan",
    "elastic.pure",
    "state.events",
    "state.records",
    "recovery.progress",
    "parallel.capabilities",
    "study.trials",
)
"""Packages and modules that import neither torch nor pyarrow nor Ray, directly or indirectly."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the name of a module, such as `undula.plan.order`, or of the package for an __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["undula", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def owner(module: str) -> str:
    """Return the package or module directly below undula that contains a module."""
    return (*module.split("."), "__init__")[1]


NAMES = {name_of(path): path for path in modules()}


@cache
def imports(path: Path, with_types: bool = False) -> frozenset[str]:
    """Modules that a file imports anywhere in its code; those for type checkers alone only if asked for."""
    return frozenset(_imports(ast.parse(path.read_text()), with_types))


def _imports(node: ast.AST, with_types: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not with_types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (name for alias in child.names if (name := f"{child.module}.{alias.name}") in NAMES)
        yield from _imports(child, with_types)


def own_imports(module: str, with_types: bool = False) -> set[str]:
    """Modules of undula that one imports, and the packages that they lie in."""
    found = {name for name in imports(NAMES[module], with_types) if name in NAMES}
    return found - {module, "undula"}  # whose __init__.py imports nothing before it is asked for a name


def with_packages(name: str) -> list[str]:
    """Return a module and the packages whose __init__.py is run when the module is imported."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts) + 1)]


@pytest.mark.parametrize("module", NAMES)
def test_imports_point_one_way(module: str) -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    own = owner(module)
    for name in own_imports(module):
        other = owner(name)
        assert other == own or level[other] < level[own], f"{module} imports {name}"
    for name in imports(NAMES[module]):
        library = name.split(".")[0]
        if library in LIBRARIES:
            assert own in LIBRARIES[library], f"{module} imports {name}"


def test_few_packages_of_the_core_know_each_other() -> None:
    core = [module for module in NAMES if ring_of(module) == "core"]
    edges = {(owner(module), owner(name)) for module in core for name in own_imports(module, with_types=True)}
    assert len({(one, other) for one, other in edges if one != other and other not in FLOOR}) <= MOST_EDGES


def test_imports_have_no_cycle() -> None:
    graph = {module: own_imports(module) for module in NAMES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", [name for name in NAMES if name.removeprefix("undula.").startswith(PURE)])
def test_pure_modules_import_no_heavy_library(module: str) -> None:
    seen: set[str] = set()
    waiting = with_packages(module)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in NAMES:
            continue
        seen.add(name)
        heavy = {each for each in imports(NAMES[name]) if each.split(".")[0] in ("torch", "pyarrow", "ray")}
        assert not heavy, f"{module} gets {heavy} through {name}"
        waiting += [part for each in own_imports(name) for part in with_packages(each)]


def test_private_names_of_other_libraries_are_used_only_where_one_list_says_so() -> None:
    """A name that is no longer used leaves the list, so that it shows what an update of a library can break."""
    trees = {module: ast.parse(path.read_text()) for module, path in NAMES.items()}
    own = {module: private_names.own_names(tree) for module, tree in trees.items()}
    used = set()
    for module, tree in trees.items():
        known = own[module].union(*(own[name] for name in own_imports(module, with_types=True)))
        names = {*private_names.used_names(tree, known), *private_names.inherited_names(tree)}
        for name in filter(None, map(private_names.private_part, names)):
            # Attributes in elastic.ray are those of Ray's objects.
            if not (module.startswith("undula.elastic.ray") and ("." not in name or name.startswith("ray."))):
                used.add((module.removeprefix("undula."), name))
    listed = [names.items() for names in private_names.ALLOWED.values()]
    allowed = {(module, name) for items in listed for name, modules in items for module in modules.split()}
    assert sorted(used - allowed) == []
    assert sorted(allowed - used) == [], "these are not used any more"


@pytest.mark.parametrize("library", private_names.ALLOWED)
def test_private_names_are_listed_for_the_installed_version(library: str) -> None:
    name, version = library.split()
    with suppress(PackageNotFoundError):
        assert f"{installed_version(name)}.".startswith(f"{version}.")


@pytest.mark.parametrize("module", NAMES)
def test_no_module_patches_another_library(module: str) -> None:
    """No attribute of an imported module is assigned, except for switches that the library documents."""
    switches = {"torch.backends.cudnn.benchmark", "torch.utils.deterministic.fill_uninitialized_memory"}
    tree = ast.parse(NAMES[module].read_text())
    foreign = set(_foreign_names(tree))
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            text = ast.unparse(target)
            if isinstance(target, ast.Attribute) and text.split(".")[0] in foreign - {"sys"}:
                assert text in switches, f"{module} assigns to {text}"


def test_signals_are_sent_through_one_module() -> None:
    """A number that was stored can be that of another process by now. This covers scripts in strings."""
    files = [path for folder in ("platform", "tests", "jobs", "docs") for path in (ROOT / folder).rglob("*.py")]
    sends = re.compile(r"\bos\.kill(pg)?\b|\bos import .*\bkill|\bpid_exists\b")
    assert [path for path in files if sends.search(path.read_text())] == [PACKAGE / "state" / "processes.py"]


def _foreign_names(tree: ast.AST) -> Iterator[str]:
    """Return the names of modules of other libraries in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)


def test_no_file_hides_the_standard_library() -> None:
    assert [path.name for path in (ROOT / "platform").iterdir() if path.name != "undula"] in ([], ["undula.egg-info"])
    assert not list(PACKAGE.rglob("platform.py"))
    for folder in (ROOT, ROOT / "platform"):
        command = [sys.executable, "-c", "import platform; print(platform.python_version())"]
        assert subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_public_names_are_read_from_the_imports_for_type_checkers() -> None:
    import undula

    assert {"ElasticTorchTrainer", "Run", "load_weights", "main"} < set(undula.__all__)
    assert undula.__all__ == sorted(undula.__all__)
    assert [getattr(undula, name).__name__ for name in undula.__all__] == undula.__all__
    assert imports(NAMES["undula"]) == {"ast", "importlib", "pathlib", "typing"}, "torch and Ray take seconds to import"


def test_every_path_that_the_readme_names_exists() -> None:
    named = re.findall(
        r"`((?:platform|jobs|docs|tests)/[\w./-]+)`|\]\(((?!http)[\w./-]+)\)", (ROOT / "README.md").read_text()
    )
    paths = {path for pair in named for path in pair if path}
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in modules():
        text = path.read_text()
        if text.count("\n") > 800:
            too_long.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 100:
                too_long.append(f"{path.name}:{node.name}")
    assert not too_long


def test_the_command_line_starts_without_heavy_libraries() -> None:
    """These imports take seconds, and Ray reads the token of a cluster at import, before `undula run` has created it."""
    heavy = {"ray", "torch", "boto3", "pyarrow"}
    check = f"import sys, undula.cli.main, undula.config.job; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_driver_imports_nothing_that_only_workers_need() -> None:
    """Sharded tensors, checkpoints and the library of TensorBoard's files take a second to import. Workers import the former while they are
    prepared, and a driver imports the latter with its first steps."""
    late = {"torch.distributed.tensor", "torch.distributed.checkpoint", "sympy", "tensorboardX", "boto3"}
    names = "undula.main, undula.Run, undula.OptimizerConfig"
    check = f"import sys, undula; {names}; sys.exit(', '.join({late} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
