"""Which trials a study wants, given what has come of those before. Pure, so that a study which was killed goes on as if it had not been."""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby, product
from math import exp, inf, log
from random import Random

from undula.plan.rules import changes_rate_alone
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import Trial

Losses = Mapping[Trial, float]
"""Of the trials that have ended; infinite where a trial diverged or was stopped."""


def wanted(spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float] | None = None) -> tuple[Trial, ...]:
    """All trials of a study that are known to be wanted, those that have ended among them, in the order in which they are to start.

    A grid and a random search want all of theirs from the beginning. What an adaptive one wants grows: it depends on the losses alone,
    not on the order in which they came.

    Args:
        spec: the study.
        losses: what an adaptive search decides by.
        firsts: first losses of trials that are complete or were stopped, where they are known.
    """
    if spec.search == "grid":
        return tuple(_grid(spec))
    if spec.search == "random":
        return tuple(_random(spec))
    return tuple(_adaptive(spec, losses, firsts or {}))


def _cells(spec: StudySpec, once: bool = False) -> Iterator[Callable[[float, int], Trial]]:
    """What a learning rate and a seed make a trial of: each batch with each optimizer, rule and warmup.

    All rules are the same at the base batch, so that it is trained under the first one alone; and so, `once`, are rules that change
    the learning rate alone at any other.
    """
    for (optimizer, rule), warmup, batch in product(spec.pairs(), spec.warmup_axis, spec.batches):
        rules = [each for kind, each in spec.pairs() if kind == optimizer]
        alike = [each for each in rules if changes_rate_alone(each, warmup)] if once else [rule]
        is_first_alike = rule not in alike or rule == alike[0]
        if rule == rules[0] or (batch != spec.batches[0] and is_first_alike):
            yield lambda lr, seed, fixed=(optimizer, rule, warmup, batch): _trial(lr, seed, *fixed)  # type: ignore[misc]


def _trial(lr: float, seed: int, optimizer: str, rule: str, warmup: int, batch: int) -> Trial:
    return Trial(batch, lr, rule, warmup, optimizer, seed)  # type: ignore[arg-type]


def _grid(spec: StudySpec) -> Iterator[Trial]:
    """A seed after the other, so that half a study has all of the axes."""
    cells = list(_cells(spec))
    for seed, lr, cell in product(spec.seeds, spec.rates, cells):
        yield cell(lr, seed)


def _random(spec: StudySpec) -> Iterator[Trial]:
    """Drawn without repetition; learning rates of a range at any place of its logarithm."""
    draw = Random(f"{spec.name} {spec.batches} {spec.rates}")
    assert spec.trials is not None
    if spec.base_lr_range is None:
        everything = list(_grid(spec))
        draw.shuffle(everything)
        yield from everything[: spec.trials]  # more of them begin with the same
        return
    cells, ends = list(_cells(spec)), (log(spec.base_lr_range.low), log(spec.base_lr_range.high))
    drawn: set[Trial] = set()
    while len(drawn) < spec.trials:
        trial = draw.choice(cells)(float(f"{exp(draw.uniform(*ends)):.4g}"), draw.choice(spec.seeds))
        if trial not in drawn:
            drawn.add(trial)
            yield trial


def _adaptive(spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float]) -> Iterator[Trial]:
    """Each cell's own search, their rounds beside each other."""
    assert spec.base_lr_range is not None
    assert spec.trials is not None
    rounds = []
    for cell in _cells(spec, once=True):
        by_place = _Cell(cell, spec, losses, firsts)
        places = list(bracket(by_place.loss, (spec.base_lr_range.points - 1) // 2, by_place.is_idle))
        rounds += [
            (number, cell(by_place.rate(place), seed))
            for number, place in enumerate(places[: max(spec.trials // len(spec.seeds), 1)])
            for seed in spec.seeds
        ]
    for _, together in groupby(sorted(rounds, key=lambda each: each[0]), key=lambda each: each[0]):
        yield from (trial for _, trial in together)


class _Cell:
    """The learning rates of a cell, counted from the middle of the range in steps of its ratio, in both directions without end."""

    def __init__(
        self, cell: Callable[[float, int], Trial], spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float]
    ):
        assert spec.base_lr_range is not None
        self._cell, self._seeds, self._losses, self._firsts = cell, spec.seeds, losses, firsts
        self._range = spec.base_lr_range

    def rate(self, place: int) -> float:
        return rate_at(self._range, place)

    def loss(self, place: int) -> float | None:
        """The mean over the seeds; None where one of them is still to come."""
        found = [self._losses.get(self._cell(self.rate(place), seed)) for seed in self._seeds]
        known = [loss for loss in found if loss is not None]
        return sum(known) / len(known) if len(known) == len(found) else None

    def is_idle(self, place: int) -> bool:
        """Whether it was tried, did not diverge, and did not fall below its first loss, as a mean over the seeds."""
        firsts = [self._firsts.get(self._cell(self.rate(place), seed)) for seed in self._seeds]
        known, loss = [first for first in firsts if first is not None], self.loss(place)
        return loss is not None and len(known) == len(firsts) and loss >= sum(known) / len(known)


def rate_at(range_: LogRange, place: int) -> float:
    """Of a place on the range's lattice, which goes on beyond both ends; 0 is in the middle."""
    step = log(range_.high / range_.low) / (range_.points - 1)
    middle = log(range_.low) + step * ((range_.points - 1) // 2)
    return float(f"{exp(middle + step * place):.4g}")


def bracket(
    loss: Callable[[int], float | None], stride: int, is_idle: Callable[[int], bool] = lambda place: False
) -> Iterator[int]:
    """Places to try for the lowest of a loss over all whole numbers, in rounds; ends where a loss that is needed is not known yet.

    Hooke & Jeeves 1961's pattern search in one dimension: the best place and those a stride away from it are tried. Where another is
    better the search goes on from there, with the same stride, however far that leads; else the stride is halved. It ends where the
    best place lies between two direct neighbours that are worse, or no better.

    Where all are idle, as nothing was learned, losses tell no direction: the search goes out on both sides, and between the highest of
    them and one above it that diverged.
    """
    best, tried = 0, {}  # type: int, dict[int, float]
    stride = max(stride, 1)
    asked = [best, best - stride, best + stride]
    while True:
        needed = [place for place in asked if place not in tried]
        yield from needed
        for place in needed:
            if (found := loss(place)) is None:
                return
            tried[place] = found
        idle = [place for place in tried if is_idle(place)]
        if idle and all(tried[place] == inf for place in tried if place not in idle):
            asked = _around_idle(idle, tried, stride)
            continue
        lowest = min(tried, key=lambda place: (tried[place], place != best))
        if tried[lowest] == inf:  # all diverged: lower ones are needed
            lowest = best - stride
        if lowest != best:
            best = lowest
        elif stride == 1:
            return
        else:
            stride //= 2
        asked = [best, best - stride, best + stride]


def _around_idle(idle: Collection[int], tried: Collection[int], stride: int) -> list[int]:
    """A stride below all that was tried, and a stride above the highest idle place, or half way to what diverged above it."""
    highest = max(idle)
    ceiling = min((place for place in tried if place > highest), default=None)
    above = highest + stride if ceiling is None else (highest + ceiling) // 2
    return [min(tried) - stride, above]
