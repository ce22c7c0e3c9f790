"""Search of a study: the trials that it wants, given the losses so far. Pure, so that a study continues in the same way after a crash."""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby, product
from math import exp, inf, log
from operator import itemgetter
from random import Random
from typing import assert_never

from undula.plan.rules import RULES
from undula.study.spec import LogRange, StudySpec
from undula.study.trials import Trial

Losses = Mapping[Trial, float]
"""Losses of the trials that have ended, which are infinite if a trial diverged or was stopped."""


def wanted(spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float] | None = None) -> tuple[Trial, ...]:
    """Return the trials that a study wants so far, in the order in which they start. They include those that have ended.

    A grid and a random search want all their trials from the beginning. An adaptive search wants more as losses arrive. Its trials
    depend only on the losses, not on the order in which they arrived.

    Args:
        spec: The study.
        losses: Losses by which an adaptive search decides.
        firsts: First losses of trials that are complete or were stopped, as far as they are known.
    """
    match spec.search:
        case "grid":
            return tuple(_grid(spec))
        case "random":
            return tuple(_random(spec))
        case "adaptive":
            return tuple(_adaptive(spec, losses, firsts or {}))
        case _:
            assert_never(spec.search)


def _cells(spec: StudySpec, once: bool = False) -> Iterator[Callable[[float, int], Trial]]:
    """Yield the cells of a study, the combinations of batch, optimizer, rule and warmup. A cell maps a learning rate and a seed to a trial.

    All rules are equal at the base batch, so only the first one is tried there.

    Args:
        spec: The study.
        once: Whether to try only one of the rules that change nothing but the learning rate. For a search that moves the learning rate
            freely, they are equal at all batches.
    """
    for (optimizer, rule), warmup, batch in product(spec.pairs(), spec.warmup_axis, spec.batches):
        rules = [own_rule for kind, own_rule in spec.pairs() if kind == optimizer]
        alike = [name for name in rules if RULES[name].changes_rate_alone(warmup)] if once else [rule]
        is_first_alike = rule not in alike or rule == alike[0]
        if rule == rules[0] or (batch != spec.batches[0] and is_first_alike):
            yield lambda lr, seed, fixed=(optimizer, rule, warmup, batch): _trial(lr, seed, *fixed)  # type: ignore[misc]


def _trial(lr: float, seed: int, optimizer: str, rule: str, warmup: int, batch: int) -> Trial:
    return Trial(batch, lr, rule, warmup, optimizer, seed)  # type: ignore[arg-type]


def _grid(spec: StudySpec) -> Iterator[Trial]:
    """Yield all trials, one seed after the other, so that an unfinished study already covers the other axes."""
    cells = list(_cells(spec))
    for seed, lr, cell in product(spec.seeds, spec.rates, cells):
        yield cell(lr, seed)


def _random(spec: StudySpec) -> Iterator[Trial]:
    """Yield random trials without repetition. Learning rates from a range are uniform in their logarithm."""
    draw = Random(f"{spec.name} {spec.batches} {spec.rates}")
    assert spec.trials is not None
    if spec.base_lr_range is None:
        everything = list(_grid(spec))
        draw.shuffle(everything)
        yield from everything[: spec.trials]  # a study with more trials begins with the same ones
        return
    cells, ends = list(_cells(spec)), (log(spec.base_lr_range.low), log(spec.base_lr_range.high))
    drawn: set[Trial] = set()
    while len(drawn) < spec.trials:
        trial = draw.choice(cells)(float(f"{exp(draw.uniform(*ends)):.4g}"), draw.choice(spec.seeds))
        if trial not in drawn:
            drawn.add(trial)
            yield trial


def _adaptive(spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float]) -> Iterator[Trial]:
    """Yield the trials of the searches of all cells, round by round."""
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
    for _, together in groupby(sorted(rounds, key=itemgetter(0)), key=itemgetter(0)):
        yield from (trial for _, trial in together)


class _Cell:
    """Learning rates of a cell as places on an unbounded lattice, on which 0 is the middle of the range."""

    def __init__(
        self, cell: Callable[[float, int], Trial], spec: StudySpec, losses: Losses, firsts: Mapping[Trial, float]
    ):
        assert spec.base_lr_range is not None
        self._cell, self._seeds, self._losses, self._firsts = cell, spec.seeds, losses, firsts
        self._range = spec.base_lr_range

    def rate(self, place: int) -> float:
        return rate_at(self._range, place)

    def loss(self, place: int) -> float | None:
        """Return the mean loss over the seeds, or None until all seeds have ended."""
        losses = [self._losses.get(self._cell(self.rate(place), seed)) for seed in self._seeds]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if len(known) == len(losses) else None

    def is_idle(self, place: int) -> bool:
        """Return whether the mean loss over the seeds did not fall below the first loss. A trial that diverged is not idle."""
        firsts = [self._firsts.get(self._cell(self.rate(place), seed)) for seed in self._seeds]
        known, loss = [first for first in firsts if first is not None], self.loss(place)
        return loss is not None and len(known) == len(firsts) and loss >= sum(known) / len(known)


def rate_at(range_: LogRange, place: int) -> float:
    """Return the learning rate at a place on the lattice of a range. Place 0 is the middle, and places continue beyond both ends."""
    step = log(range_.high / range_.low) / (range_.points - 1)
    middle = log(range_.low) + step * ((range_.points - 1) // 2)
    return float(f"{exp(middle + step * place):.4g}")


def bracket(
    loss: Callable[[int], float | None], stride: int, is_idle: Callable[[int], bool] = lambda place: False
) -> Iterator[int]:
    """Yield the places to try, in rounds, in a search for the lowest loss over all integers.

    This is the pattern search of Hooke & Jeeves 1961 in one dimension. It tries the best place and the places one stride away from it.
    If one of these is better, the search continues from there with the same stride, without a limit; otherwise it halves the stride. It
    ends when the best place lies between two direct neighbours that are not better, or when it needs a loss that is not known yet.

    If all places are idle, their losses give no direction. The search then continues on both sides: a stride below the lowest place,
    and above the highest idle place, towards a place that diverged.

    Args:
        loss: Function that returns the loss at a place, or None if it is not known yet.
        stride: Distance of the first neighbours.
        is_idle: Function that returns whether the trials at a place have learned nothing.
    """
    best, tried = 0, {}  # type: int, dict[int, float]
    stride = max(stride, 1)
    asked = [best, best - stride, best + stride]
    while True:
        needed = [place for place in asked if place not in tried]
        yield from needed
        for place in needed:
            if (value := loss(place)) is None:
                return
            tried[place] = value
        idle = [place for place in tried if is_idle(place)]
        if idle and all(tried[place] == inf for place in tried if place not in idle):
            asked = _around_idle(idle, tried, stride)
            continue
        lowest = min(tried, key=lambda place: (tried[place], place != best))
        if tried[lowest] == inf:  # all of them diverged, so the search tries lower rates
            lowest = best - stride
        if lowest != best:
            best = lowest
        elif stride == 1:
            return
        else:
            stride //= 2
        asked = [best, best - stride, best + stride]


def _around_idle(idle: Collection[int], tried: Collection[int], stride: int) -> list[int]:
    """Return the next places if all are idle or diverged: one below all tried places, and one above the highest idle place.

    The latter is a stride above it or, if there is a place that diverged, half way to that place.
    """
    highest = max(idle)
    ceiling = min((place for place in tried if place > highest), default=None)
    above = highest + stride if ceiling is None else (highest + ceiling) // 2
    return [min(tried) - stride, above]
