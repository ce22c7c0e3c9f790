"""Whether the code of a script may read a variable before it assigns it anew, by its bytecode."""

import dis
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import CodeType

REPLACING = frozenset({"clear", "copy_", "fill_", "manual_seed", "reset", "seed", "zero_"})
"""Methods after whose call the former content of an object has no effect."""
ADDING = frozenset({"add", "append", "appendleft", "extend", "insert"})
"""Methods that read nothing of an object."""
JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
ALWAYS = "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT"
"""Beginnings of the names of jumps without a condition."""


@dataclass(frozen=True)
class Reads:
    """Search for reads of a variable. What it finds in doubt is that there is none.

    Args:
        name: Name of the variable.
        attribute: Attribute of its object, if only that is searched for.
        methods: Names of functions and properties of its object, which may read the attribute.
        is_global: Whether it is a variable of the module.
        functions: Code of functions of the script, by the names that the code has for them.
        others: Names of other variables whose objects refer to that of the variable.
    """

    name: str
    attribute: str = ""
    methods: Collection[str] = ()
    is_global: bool = False
    functions: Mapping[str, CodeType] = field(default_factory=dict)
    others: Collection[str] = ()
    _open: set[CodeType] = field(default_factory=set)
    """Functions in which the search is, as they may call themselves."""

    def reads(self, code: CodeType, after: int | None = None) -> bool:
        """Return whether the variable may be read before it is assigned.

        Args:
            code: Code of a function.
            after: Offset of the instruction after which the search begins; None for the beginning of the code. It is that of a loop or of
                a call, which is not a part of the search.
        """
        return any(effect == "reads" for effect in self._first_effects(code, after))

    def _first_effects(self, code: CodeType, after: int | None = None) -> Iterator[str]:
        """Yield what the ways through the code first do with the variable, where they do anything: "reads" or "assigns"."""
        steps = list(dis.get_instructions(code))
        numbers = {each.offset: number for number, each in enumerate(steps)}
        if code in self._open or (after is not None and after not in numbers):
            return
        places, seen = [0] if after is None else _next(steps, numbers, numbers[after]), set[int]()
        self._open.add(code)
        try:
            while places:
                number = places.pop()
                effect = None if steps[number].offset == after else self._effect(steps, number)
                if effect and number not in seen:
                    yield effect
                elif number not in seen:
                    places += _next(steps, numbers, number)
                seen.add(number)
        finally:
            self._open.remove(code)

    def _effect(self, steps: list[dis.Instruction], number: int) -> str | None:
        kind, argument = steps[number].opname, steps[number].argval
        if isinstance(argument, CodeType):  # a function or a comprehension that the code makes
            return self._effect_of(argument)
        names = argument if isinstance(argument, tuple) else (argument,)  # Python 3.13 loads two variables at once
        is_variable = kind.startswith(("LOAD_", "STORE_", "DELETE_")) and not kind.endswith(
            ("ATTR", "CONST", "METHOD", "CLOSURE")
        )
        if not is_variable:
            return None
        if self.name in names and self.is_global == kind.endswith(("GLOBAL", "NAME")):
            return "assigns" if not kind.startswith("LOAD_") else self._use(steps, number)
        if any(name in self.others for name in names):
            return "reads"
        called = (self._effect_of(self.functions[name]) for name in names if name in self.functions)
        return next(filter(None, called), None)

    def _effect_of(self, called: CodeType) -> str | None:
        """Return what a call of a function does with the variable."""
        if not self.is_global and self.name not in called.co_freevars:
            return None
        effects = set(self._first_effects(called))
        return "reads" if "reads" in effects else "assigns" if effects else None

    def _use(self, steps: list[dis.Instruction], number: int) -> str | None:
        """Return what follows from an instruction that loads the variable."""
        follows, methods = steps[number + 1 :], ("LOAD_ATTR", "LOAD_METHOD")
        if follows[0].opname in methods and follows[0].argval in REPLACING:
            return "assigns"
        if self.attribute and follows[0].opname in ("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR"):
            if follows[0].argval != self.attribute:
                return "reads" if follows[0].argval in self.methods else None
            if follows[0].opname != "LOAD_ATTR":
                return "assigns"
            follows = follows[1:]
        elif self.attribute:
            return "reads"
        if follows[0].opname in methods and follows[0].argval in REPLACING | ADDING:
            return "assigns" if follows[0].argval in REPLACING else None
        if follows[1].opname == "BINARY_SUBSCR" and follows[0].argval == -1:
            return None  # what was appended before
        height = 0  # of the stack above the object
        for each, later in pairwise(follows):
            if each.opname in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"):
                return "assigns" if height == (2 if each.opname == "STORE_SLICE" else 1) else "reads"
            height += dis.stack_effect(each.opcode, each.arg, jump=False)
            if height == 0 and each.opname == "BINARY_SUBSCR" and later.opname in methods and later.argval in ADDING:
                return None
            if height < 0 or each.opcode in JUMPS:
                break
        return "reads"


def _next(steps: list[dis.Instruction], numbers: Mapping[int, int], number: int) -> list[int]:
    """Return the instructions of which one follows. The body of a loop within the loop of the script is taken to run at least once."""
    kind, follows = steps[number].opname, [number + 1]
    if kind.startswith(("RETURN_", "RAISE_", "RERAISE")):
        return []
    if number + 2 < len(steps) and steps[number + 1].opname == "FOR_ITER":
        follows = [number + 2]
    if steps[number].opcode not in JUMPS:
        return follows
    target = numbers[steps[number].argval]
    return [target] if kind.startswith(ALWAYS) else [*follows, target]
