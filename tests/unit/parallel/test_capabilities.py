"""Tests of the table of engines: which engine trains a job, and which jobs are refused."""

from itertools import product
from typing import get_args

import pytest

from undula.parallel.capabilities import CONFLICTS, ENGINES, EngineKind, Feature, engine_with, features_of, refusal
from undula.parallel.spec import Compression, EngineName, GradientSpec, Reduction

PLAIN = GradientSpec()


def test_each_engine_is_in_the_table_once_and_only_the_last_is_selected_by_nothing() -> None:
    assert {each.name for each in ENGINES} == set(get_args(EngineKind))
    assert len(ENGINES) == len(get_args(EngineKind))
    selecting = [each.chosen_by for each in ENGINES]
    assert selecting[-1] is None
    assert len(set(selecting)) == len(selecting)
    assert all(each.chosen_by not in each.supports for each in ENGINES)


def test_a_setting_requires_its_feature() -> None:
    assert features_of("torch", False, PLAIN, False) == set()
    assert features_of("horovod", False, PLAIN, False) == {Feature.HOROVOD}
    assert features_of("torch", True, PLAIN, False) == {Feature.DETERMINISTIC}
    assert features_of("torch", False, PLAIN, True) == {Feature.NOISE_SCALE}
    assert features_of("torch", False, GradientSpec(reduce="sum"), False) == set()
    assert features_of("torch", False, GradientSpec(reduce="adasum"), False) == {Feature.ADASUM}
    assert features_of("torch", False, GradientSpec(compression="fp16"), False) == {Feature.FP16_GRADIENTS}
    assert features_of("torch", False, PLAIN, False, "bf16") == {Feature.BF16}
    assert features_of("torch", False, PLAIN, False, "fp16") == {Feature.FP16}


def test_every_combination_of_settings_is_known() -> None:
    names = (get_args(EngineName), get_args(Reduction), get_args(Compression))
    for engine, reduction, compression in product(*names):
        found = features_of(engine, True, GradientSpec(reduce=reduction, compression=compression), True)
        assert {Feature.DETERMINISTIC, Feature.NOISE_SCALE} <= found


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (set(), "data parallel"),
        ({Feature.FP16_GRADIENTS, Feature.SPARSE_GRADIENTS, Feature.NOISE_SCALE}, "data parallel"),
        ({Feature.HOROVOD}, "horovod"),
        ({Feature.HOROVOD, Feature.ADASUM}, "adasum"),
        ({Feature.HOROVOD, Feature.DETERMINISTIC}, "exact"),
        ({Feature.SHARDED}, "fsdp"),
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
