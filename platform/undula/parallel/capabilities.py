"""Table of the features that each engine supports. It decides which engine trains a job and which jobs are refused. Pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from undula.parallel.spec import EngineSettings

EngineKind = Literal["sharded", "adasum", "data parallel"]


class Feature(StrEnum):
    """A feature that a job or its model can require of an engine. The value is its name in messages."""

    SHARDED = "a sharded model (sharding.stage, or fully_shard() in the script)"
    ADASUM = "gradient.reduce=adasum"
    LIBRARY = "an engine other than torch, such as engine=horovod,"
    COMPRESSION = "gradient.compression"
    NOISE_SCALE = "gradient.noise_every_steps, or a schedule.batch_rule that measures noise,"
    SPARSE_GRADIENTS = "a model with sparse gradients (sparse=True)"
    BF16 = "precision.compute=bf16"
    FP16 = "precision.compute=fp16"
    HALF_PARAMETERS = "a model with trainable bfloat16 or float16 parameters"


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


FORMATS = frozenset({Feature.BF16, Feature.FP16, Feature.HALF_PARAMETERS})
"""Features about number formats, each of which every engine supports. CONFLICTS has those that exclude each other."""
SHARDED = Capabilities(
    "sharded", Feature.SHARDED, FORMATS | {Feature.COMPRESSION, Feature.NOISE_SCALE}, equal_rounds=True
)
ADASUM = Capabilities("adasum", Feature.ADASUM, FORMATS | {Feature.LIBRARY})
DATA_PARALLEL = Capabilities(
    "data parallel",
    None,
    FORMATS | {Feature.LIBRARY, Feature.COMPRESSION, Feature.NOISE_SCALE, Feature.SPARSE_GRADIENTS},
)
ENGINES = (SHARDED, ADASUM, DATA_PARALLEL)
"""Engines in order of precedence. The first engine whose selecting feature a job requires trains the job; the last is the default."""

_ROUNDED = (
    "because the optimizer's small changes would be rounded away; make these parameters float32, and their matrix "
    "products are still computed in 16 bits"
)
CONFLICTS: Mapping[tuple[Feature, Feature], str] = {
    (Feature.HALF_PARAMETERS, Feature.BF16): _ROUNDED,
    (Feature.HALF_PARAMETERS, Feature.FP16): _ROUNDED,
}
"""Features that no engine combines, with the reason and the fix."""


def features_of(settings: EngineSettings) -> set[Feature]:
    """Return the features that a job's settings require. The model of the job may require more."""
    gradient = settings.gradient
    asked = {
        Feature.SHARDED: settings.sharding.stage > 0,
        Feature.LIBRARY: settings.engine != "torch",
        Feature.ADASUM: gradient.reduce == "adasum",
        Feature.COMPRESSION: gradient.compression != "none",
        Feature.NOISE_SCALE: settings.measures_noise,
        Feature.BF16: settings.compute == "bf16",
        Feature.FP16: settings.compute == "fp16",
    }
    return {feature for feature, is_asked in asked.items() if is_asked}


def engine_with(features: Set[Feature]) -> Capabilities:
    """Return the engine that trains a job with these features, provided that `refusal` returns None."""
    return next(engine for engine in ENGINES if engine.chosen_by is None or engine.chosen_by in features)


def refusal(features: Set[Feature]) -> str | None:
    """Return the reason why no engine can train a job with these features, as a sentence; None if an engine can."""
    for (one, other), reason in CONFLICTS.items():
        if one in features and other in features:
            return f"{one} cannot be combined with {other}, {reason}"
    engine = engine_with(features)
    for feature in Feature:
        if feature in features and feature is not engine.chosen_by and feature not in engine.supports:
            assert engine.chosen_by is not None, "the default engine supports every feature that selects no engine"
            return f"{feature} cannot be combined with {engine.chosen_by}; remove one of them"
    return None


def markdown_table() -> str:
    """Return the table of engines and features in Markdown, for the documentation."""
    lines = [f"| | {' | '.join(engine.name for engine in ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for feature in Feature:
        cells = (
            "selects" if feature is engine.chosen_by else "yes" if feature in engine.supports else ""
            for engine in ENGINES
        )
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown_conflicts() -> str:
    """Return the features that exclude each other in Markdown, for the documentation."""
    return "\n".join(
        f"- {one} cannot be combined with {other}, {reason}." for (one, other), reason in CONFLICTS.items()
    )
