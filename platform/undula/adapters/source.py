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
    if lines := [node.lineno for _, nodes in _loops(script) for node in nodes if isinstance(node, ast.Break)]:
        raise UsageError(
            f"{Path(script.f_code.co_filename).name}:{min(lines)}: this `break` leaves the loop over batches after a number of "
            "steps that the script counts itself, and after an interruption it would count them from 0; set plan.max_steps in the job's "
            "YAML to that number, with which the `break` may stay, or remove it"
        )


def refuse_counted_steps(script: FrameType) -> None:
    """Refuse a step of the optimizer, or clipping, after a number of batches that a loop with a backward pass counts itself.

    Args:
        script: Function that runs. Functions of its file that it calls are read as well.

    Raises:
        UsageError: There is one.
    """
    for loop, nodes in _loops(script):
        counts = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
        if "enumerate(" in ast.unparse(loop.iter) and isinstance(loop.target, ast.Tuple):
            counts.add(ast.unparse(loop.target.elts[0]))
        for node in (each for each in nodes if isinstance(each, ast.If)):
            is_counted = any(ast.unparse(part) in counts for part in ast.walk(node.test))
            if is_counted and (calls := [*filter(_ends_step, _below(node.body, ()))]):
                raise UsageError(
                    f"{Path(script.f_code.co_filename).name}:{node.lineno}: this `if` calls {ast.unparse(calls[0]).split('(')[0]}() "
                    "after a number of batches that the script counts itself, but the number of workers decides how many each has in a "
                    "step; call it for each batch in `with accelerator.accumulate(model)`, pass the number of batches as "
                    "Accelerator(gradient_accumulation_steps=...), and leave the loss undivided"
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


def _loops(script: FrameType) -> Iterator[tuple[ast.For, list[ast.AST]]]:
    """Yield the loops with a backward pass of their own, and what is in them, of a function and of those of its file that it calls."""
    functions = _functions(script)
    own = functions.get(script.f_code.co_firstlineno)
    read = [own] if own else []
    for each in read:  # which grows by what it calls
        called = {name for node in ast.walk(each) if (name := _called(node))}
        read += [other for other in functions.values() if other.name in called and other not in read]
    for loop in (node for each in read for node in ast.walk(each) if isinstance(node, ast.For)):
        nodes = list(_below(loop.body, (ast.For, ast.While)))
        if any(_called(node, ast.Attribute) == "backward" for node in nodes):
            yield loop, nodes


def _ends_step(node: ast.AST) -> bool:
    """Return whether a node is a call that clips a gradient, or of an optimizer's step."""
    owner = ast.unparse(node.func.value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return _called(node) == "clip_grad_norm_" or (_called(node) == "step" and "opt" in owner.lower())


def _called(node: ast.AST, kind: type[ast.AST] = ast.AST) -> str | None:
    """Return the name of the function or method that a node calls by a name of a kind; None if it calls none."""
    function = node.func if isinstance(node, ast.Call) and isinstance(node.func, kind) else None
    return getattr(function, "attr", getattr(function, "id", None))


def _below(nodes: Iterable[ast.AST], closed: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Yield nodes and those below them, without the insides of some types."""
    for node in nodes:
        yield node
        if not isinstance(node, closed):
            yield from _below(ast.iter_child_nodes(node), closed)
