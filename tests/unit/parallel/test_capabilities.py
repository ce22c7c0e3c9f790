"""Tests of the table of engines: which engine trains a job, and which jobs are refused."""

from typing import get_args

import pytest

from undula.parallel.capabilities import CONFLICTS, ENGINES, EngineKind, Feature, engine_with, features_of, refusal
from undula.parallel.spec import Compression, EngineName, EngineSettings, GradientSpec, Reduction, ShardingSpec
from undula.plan.precision import Compute


def test_each_engine_is_in_the_table_once_and_only_the_last_is_selected_by_nothing() -> None:
    assert {each.name for each in ENGINES} == set(get_args(EngineKind))
    assert len(ENGINES) == len(get_args(EngineKind))
    selecting = [each.chosen_by for each in ENGINES]
    assert selecting[-1] is None
    assert len(set(selecting)) == len(selecting)
    assert all(each.chosen_by not in each.supports for each in ENGINES)


REQUIRED: dict[tuple[str, str], set[Feature]] = {
    ("engine", "torch"): set(),
    ("engine", "horovod"): {Feature.LIBRARY},
    ("reduce", "average"): set(),
    ("reduce", "sum"): set(),
    ("reduce", "adasum"): {Feature.ADASUM},
    ("compression", "none"): set(),
    ("compression", "fp16"): {Feature.COMPRESSION},
    ("compression", "bf16"): {Feature.COMPRESSION},
    ("compute", "fp32"): set(),
    ("compute", "bf16"): {Feature.BF16},
    ("compute", "fp16"): {Feature.FP16},
}


def test_each_value_of_a_setting_requires_its_features() -> None:
    kinds = {"engine": EngineName, "reduce": Reduction, "compression": Compression, "compute": Compute}
    for setting, kind in kinds.items():
        for value in get_args(kind):
            chosen = {setting: value}
            gradient = GradientSpec(**(chosen if setting in ("reduce", "compression") else {}))
            own = chosen if setting in ("engine", "compute") else {}
            assert features_of(EngineSettings(1, gradient=gradient, **own)) == REQUIRED[setting, value]
    assert features_of(EngineSettings(1, sharding=ShardingSpec(1))) == {Feature.SHARDED}
    assert features_of(EngineSettings(1, measures_noise=True)) == {Feature.NOISE_SCALE}


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (set(), "data parallel"),
        ({Feature.COMPRESSION, Feature.SPARSE_GRADIENTS, Feature.NOISE_SCALE, Feature.FP16}, "data parallel"),
        ({Feature.LIBRARY, Feature.COMPRESSION}, "data parallel"),
        ({Feature.LIBRARY, Feature.ADASUM}, "adasum"),
        ({Feature.BF16, Feature.ADASUM}, "adasum"),
        ({Feature.SHARDED, Feature.FP16}, "sharded"),
    ],
)
def test_the_first_engine_that_a_feature_selects_trains_the_job(features: set[Feature], name: str) -> None:
    assert engine_with(features).name == name
    assert refusal(features) is None


@pytest.mark.parametrize(("one", "other"), CONFLICTS)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda each: each.name)
def test_no_engine_combines_features_that_exclude_each_other(engine, one: Feature, other: Feature) -> None:
    own = {engine.chosen_by} if engine.chosen_by else set()
    problem = refusal(own | {one, other})
    assert problem is not None
    assert problem.startswith(f"{one} cannot be combined with {other}, because ")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda each: each.name)
def test_a_feature_that_an_engine_lacks_is_refused_by_its_name(engine) -> None:
    own = {engine.chosen_by} if engine.chosen_by else set()
    for feature in Feature:
        if engine_with(own | {feature}) is not engine or feature is engine.chosen_by:
            continue  # the feature selects another engine
        problem = refusal(own | {feature})
        if feature in engine.supports:
            assert problem is None
        else:
            assert problem == f"{feature} cannot be combined with {engine.chosen_by}; remove one of them"
