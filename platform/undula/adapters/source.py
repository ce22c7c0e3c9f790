"""What the source of a script shows before it trains: statements that fail the job, or change its result, only when they are reached."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from undula.errors import UsageError


def refuse_break(script: FrameType) -> None:
    """Refuse a `break` out of a loop with a backward pass in a function that runs, or in one of its file that it calls.

    Raises:
        UsageError: There is one.
    """
    functions = _functions(script)
    own = functions.get(script.f_code.co_firstlineno)
    calls = [node.func for node in ast.walk(own) if isinstance(node, ast.Call)] if own else []
    called = {call.id for call in calls if isinstance(call, ast.Name)}
    read = [each for each in functions.values() if each is own or each.name in called]
    loops = [node for each in read for node in ast.walk(each) if isinstance(node, ast.For)]
    if lines := [line for loop in loops for line in _breaks(loop)]:
        raise UsageError(
            f"{Path(script.f_code.co_filename).name}:{min(lines)}: this `break` leaves the loop over batches after a number of "
            "steps that the script counts itself, and after an interruption it would count them from 0; set plan.max_steps in the job's "
            "YAML to that number, with which the `break` may stay, or remove it"
        )


def refuse_later(script: FrameType, class_name: str, has: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuse what a function that runs will read, below its current line and in any case, of an object that does not have it.

    Args:
        script: The function.
        class_name: Name of the class of the object, which the function assigns to a name.
        has: Attributes of the object.
        instead: What to do instead, for some of the others.

    Raises:
        UsageError: There is such an attribute.
    """
    own = _functions(script).get(script.f_code.co_firstlineno)
    nodes = list(_below(own.body if own else (), (ast.If, ast.Try, ast.FunctionDef, ast.Lambda)))
    calls = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    made = [node for node in calls if ast.unparse(node.value).split("(")[0].rpartition(".")[2] == class_name]
    names = {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}
    for node in (each for each in nodes if isinstance(each, ast.Attribute)):
        is_read = isinstance(node.value, ast.Name) and node.value.id in names
        if is_read and node.lineno > script.f_lineno and node.attr not in has:
            raise UsageError(
                f"{Path(script.f_code.co_filename).name}:{node.lineno}: {class_name}.{node.attr} is not possible in a run; "
                f"{instead.get(node.attr, 'remove it')}"
            )


def _functions(script: FrameType) -> dict[int, ast.FunctionDef]:
    """Return the functions in the file of one that runs, by the number of the first line of each, where its decorators begin."""
    try:
        tree = ast.parse(Path(script.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError):  # of a function that was typed in, and has no file
        return {}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min([each.lineno, *(part.lineno for part in each.decorator_list)]): each for each in found}


def _breaks(loop: ast.For) -> list[int]:
    """Return the lines of the breaks out of a loop, if it has a backward pass of its own."""
    nodes = list(_below(loop.body, (ast.For, ast.While)))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    trains = any(isinstance(call, ast.Attribute) and call.attr == "backward" for call in calls)
    return [node.lineno for node in nodes if trains and isinstance(node, ast.Break)]


def _below(nodes: Iterable[ast.AST], closed: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Yield nodes and those below them, without the insides of some types."""
    for node in nodes:
        yield node
        if not isinstance(node, closed):
            yield from _below(ast.iter_child_nodes(node), closed)
