"""Table of the features that each engine supports. It decides which engine trains a job and which jobs are refused. Pure."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, assert_never

from undula.parallel.spec import Compression, EngineName, GradientSpec, Reduction

EngineKind = Literal["fsdp", "exact", "adasum", "horovod", "data parallel"]


class Feature(StrEnum):
    """A feature that a job or its model can require of an engine. The value is its name in messages."""

    SHARDED = "a model that fully_shard() has sharded"
    DETERMINISTIC = "deterministic=true"
    ADASUM = "gradient.reduce=adasum"
    HOROVOD = "engine=horovod"
    FP16_GRADIENTS = "gradient.compression=fp16"
    NOISE_SCALE = "gradient.noise_every_steps, or a schedule.batch_rule that measures noise,"
    SPARSE_GRADIENTS = "a model with sparse gradients (sparse=True)"


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do."""

    name: EngineKind
    chosen_by: Feature | None
    """Feature that selects the engine; None for the default engine."""
    supports: Set[Feature]
    """Features that the engine supports in addition to the one that selects it."""
    equal_rounds: bool = False
    """Whether all ranks must run the same number of micro-batches, because forward and backward passes contain collectives."""


FSDP = Capabilities("fsdp", Feature.SHARDED, frozenset(), equal_rounds=True)
EXACT = Capabilities("exact", Feature.DETERMINISTIC, frozenset({Feature.HOROVOD, Feature.NOISE_SCALE}))
ADASUM = Capabilities("adasum", Feature.ADASUM, frozenset({Feature.HOROVOD}))
HOROVOD = Capabilities("horovod", Feature.HOROVOD, frozenset({Feature.FP16_GRADIENTS, Feature.NOISE_SCALE}))
DATA_PARALLEL = Capabilities(
    "data parallel", None, frozenset({Feature.FP16_GRADIENTS, Feature.NOISE_SCALE, Feature.SPARSE_GRADIENTS})
)
ENGINES = (FSDP, EXACT, ADASUM, HOROVOD, DATA_PARALLEL)
"""Engines in order of precedence. The first engine whose selecting feature a job requires trains the job; the last is the default."""


def features_of(engine: EngineName, deterministic: bool, gradient: GradientSpec, measures_noise: bool) -> set[Feature]:
    """Return the features that a job's settings require. The model of the job may require more."""
    asked = (
        _feature_of_engine(engine),
        _feature_of_reduction(gradient.reduce),
        _feature_of_compression(gradient.compression),
        Feature.DETERMINISTIC if deterministic else None,
        Feature.NOISE_SCALE if measures_noise else None,
    )
    return {feature for feature in asked if feature}


def _feature_of_engine(engine: EngineName) -> Feature | None:
    match engine:
        case "torch":
            return None
        case "horovod":
            return Feature.HOROVOD
        case _:
            assert_never(engine)


def _feature_of_reduction(reduction: Reduction) -> Feature | None:
    match reduction:
        case "average" | "sum":
            return None
        case "adasum":
            return Feature.ADASUM
        case _:
            assert_never(reduction)


def _feature_of_compression(compression: Compression) -> Feature | None:
    match compression:
        case "none":
            return None
        case "fp16":
            return Feature.FP16_GRADIENTS
        case _:
            assert_never(compression)


def engine_with(features: Set[Feature]) -> Capabilities:
    """Return the engine that trains a job with these features, provided that `refusal` returns None."""
    return next(each for each in ENGINES if each.chosen_by is None or each.chosen_by in features)


def refusal(features: Set[Feature]) -> str | None:
    """Return the reason why no engine can train a job with these features, as a sentence; None if an engine can."""
    engine = engine_with(features)
    for feature in Feature:
        if feature in features and feature is not engine.chosen_by and feature not in engine.supports:
            assert engine.chosen_by is not None, "the default engine supports every feature that selects no engine"
            return f"{feature} cannot be combined with {engine.chosen_by}; remove one of them"
    return None


def markdown_table() -> str:
    """Return the table of engines and features in Markdown, for the documentation."""
    lines = [f"| | {' | '.join(each.name for each in ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for feature in Feature:
        cells = (
            "selects" if feature is each.chosen_by else "yes" if feature in each.supports else "" for each in ENGINES
        )
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)
