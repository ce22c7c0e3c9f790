"""What each engine can do, and which engine trains a job: one table, from which refusals and the documentation follow. Pure."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from undula.parallel.spec import EngineName, GradientSpec


class Feature(StrEnum):
    """Something that a job or its model asks of an engine. The value is how messages name it."""

    SHARDED = "a model that fully_shard() has sharded"
    DETERMINISTIC = "deterministic=true"
    ADASUM = "gradient.reduce=adasum"
    HOROVOD = "engine=horovod"
    FP16_GRADIENTS = "gradient.compression=fp16"
    NOISE_SCALE = "a measured gradient noise scale (gradient.noise_every_steps, or a schedule.batch_rule that needs it)"
    SPARSE_GRADIENTS = "a model with sparse gradients (sparse=True)"


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do."""

    name: str
    chosen_by: Feature | None
    """Feature that selects the engine; None for the engine of all other jobs."""
    supports: Set[Feature]
    """Features that the engine can train with, beside the one that selects it."""
    equal_rounds: bool = False
    """Whether every rank must run the model equally often, because running it takes all of them."""


FSDP = Capabilities("fsdp", Feature.SHARDED, frozenset(), equal_rounds=True)
EXACT = Capabilities("exact", Feature.DETERMINISTIC, frozenset({Feature.HOROVOD, Feature.NOISE_SCALE}))
ADASUM = Capabilities("adasum", Feature.ADASUM, frozenset({Feature.HOROVOD}))
HOROVOD = Capabilities("horovod", Feature.HOROVOD, frozenset({Feature.FP16_GRADIENTS, Feature.NOISE_SCALE}))
DATA_PARALLEL = Capabilities(
    "data parallel", None, frozenset({Feature.FP16_GRADIENTS, Feature.NOISE_SCALE, Feature.SPARSE_GRADIENTS})
)
ENGINES = (FSDP, EXACT, ADASUM, HOROVOD, DATA_PARALLEL)
"""In order of precedence: the first engine whose feature a job asks for trains it."""


def features_of(engine: EngineName, deterministic: bool, gradient: GradientSpec, measures_noise: bool) -> set[Feature]:
    """Features that a job's settings ask for; its model may ask for more."""
    asked = {
        Feature.HOROVOD: engine == "horovod",
        Feature.DETERMINISTIC: deterministic,
        Feature.ADASUM: gradient.reduce == "adasum",
        Feature.FP16_GRADIENTS: gradient.compression == "fp16",
        Feature.NOISE_SCALE: measures_noise,
    }
    return {feature for feature, is_asked in asked.items() if is_asked}


def engine_with(features: Set[Feature]) -> Capabilities:
    """The engine that trains a job with these features, if any engine does: see `refusal`."""
    return next(each for each in ENGINES if each.chosen_by is None or each.chosen_by in features)


def refusal(features: Set[Feature]) -> str | None:
    """Why no engine can train a job with these features, as a sentence; None where one can."""
    engine = engine_with(features)
    for feature in Feature:
        if feature in features and feature is not engine.chosen_by and feature not in engine.supports:
            assert engine.chosen_by is not None, "the engine of all other jobs supports what none selects"
            return f"{engine.chosen_by} cannot be combined with {feature}; remove one of them"
    return None


def markdown_table() -> str:
    """The table of engines and features, for the documentation."""
    lines = [f"| | {' | '.join(each.name for each in ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for feature in Feature:
        cells = (
            "selects" if feature is each.chosen_by else "yes" if feature in each.supports else "" for each in ENGINES
        )
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)
