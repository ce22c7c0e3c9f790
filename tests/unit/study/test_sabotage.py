"""Tests that `undula study self-test` fails if a rule, schedule, optimizer, or the estimator of the noise scale is changed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from undula.optim import optimizers
from undula.optim.lamb import Lamb
from undula.optim.lars import LARS
from undula.plan import noise, rules
from undula.plan.noise import NoiseScale, StepNorms
from undula.plan.rules import RULES, Rule, RuleName, Scaled
from undula.plan.schedule import Schedule, ScheduleSpec
from undula.study.self_test import TOPICS, SelfTestResult
from undula.train import learning_rate, noise_scale
from undula.train.learning_rate import Rate
from undula.train.noise_scale import NoiseScaleMeter


def failures(topic: str) -> list[str]:
    results = (SelfTestResult(topic, *row) for row in TOPICS[topic]())
    return [each.what for each in results if not each.passed]


@pytest.mark.parametrize("topic", ["Rules", "Schedules", "Optimizers", "Gradient noise scale (McCandlish 2018)"])
def test_nothing_fails_without_sabotage(topic: str) -> None:
    assert failures(topic) == []


def changed(rule: RuleName, **factors: float | None) -> Rule:
    """Return a rule with other changes to a step, as factors on its own or as new values of what it keeps."""
    shipped = RULES[rule]

    def scaled(kappa: float, noise: float | None) -> Scaled:
        found = shipped.scaled(kappa, noise)
        news = {
            key: None if factor is None else factor * (getattr(found, key) or 1.0) for key, factor in factors.items()
        }
        return replace(found, **news)  # type: ignore[arg-type]

    return replace(shipped, scaled=scaled)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("change", [{"lr": 1.02}, {"warmup": 1.5}, {"one_minus_beta": 1.1}, {"gain": 1.1}])
def test_a_changed_rule_fails(monkeypatch: pytest.MonkeyPatch, rule: RuleName, change: Mapping[str, float]) -> None:
    monkeypatch.setitem(RULES, rule, changed(rule, **change))  # type: ignore[arg-type]
    assert failures("Rules")


@pytest.mark.parametrize(
    ("rule", "change"),
    [("adam_sde", {"one_minus_beta": None}), ("adam_sde", {"eps": 2.0}), ("adascale", {"gain": None})],
)  # fmt: skip
def test_a_rule_without_one_of_its_changes_fails(
    monkeypatch: pytest.MonkeyPatch, rule: RuleName, change: Mapping[str, float | None]
) -> None:
    monkeypatch.setitem(RULES, rule, changed(rule, **change))  # type: ignore[arg-type]
    assert failures("Rules")


def test_surge_is_checked_against_steps_along_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "surge", replace(RULES["surge"], scaled=lambda kappa, noise: Scaled(kappa**0.25)))  # type: ignore[arg-type]
    assert any("sampled" in each for each in failures("Surge (Li 2024)"))


def nothing(*arguments: Any, **named: Any) -> None:
    pass


DECAY_SHAPES = ("constant", "cosine", "polynomial", "step", "inverse_sqrt", "wsd")


@pytest.mark.parametrize("decay", DECAY_SHAPES)
def test_a_changed_decay_fails(monkeypatch: pytest.MonkeyPatch, decay: str) -> None:
    shipped = Schedule._decay

    def changed_decay(self: Schedule, samples: float) -> float:
        return shipped(self, samples) * (0.98 if self.spec.decay == decay else 1.0)

    monkeypatch.setattr(Schedule, "_decay", changed_decay)
    assert failures("Schedules")


@pytest.mark.parametrize("warmup", ["constant", "linear", "exponential"])
def test_a_changed_warmup_fails(monkeypatch: pytest.MonkeyPatch, warmup: str) -> None:
    shipped = Schedule._warmup

    def changed_warmup(self: Schedule, done: float) -> float:
        return shipped(self, done) * (0.98 if self.spec.warmup == warmup else 1.0)

    monkeypatch.setattr(Schedule, "_warmup", changed_warmup)
    assert failures("Schedules")


@pytest.mark.parametrize(
    ("topic", "owner", "name", "replacement"),
    [
        ("Rules", rules, "_saturating", lambda kappa, noise: 1.0),
        ("Rules", learning_rate, "scaled_beta", lambda beta, factor: beta),
        ("Rules", Rate, "at", lambda self, samples, *_: learning_rate.StepRate(1.0, Scaled(), samples)),
        ("Schedules", ScheduleSpec, "over", lambda self, plan: Schedule(self, 500.0, plan.total_samples)),
        ("Gradient noise scale (McCandlish 2018)", StepNorms, "estimates", lambda self: (-1.0, -1.0)),
        ("Gradient noise scale (McCandlish 2018)", StepNorms, "estimates",
         lambda self: (self.small_squared - self.whole_squared, self.whole_squared)),
        ("Gradient noise scale (McCandlish 2018)", NoiseScale, "samples", property(lambda self: 12345.0)),
        ("Gradient noise scale (McCandlish 2018)", noise, "DECAY", 0.5),
        ("Gradient noise scale (McCandlish 2018)", noise_scale, "square_sums",
         lambda groups: groups[0][0].sum().reshape(1)),
        ("Gradient noise scale (McCandlish 2018)", NoiseScaleMeter, "small_squares", lambda self, *_: [1.0, 1.0]),
        ("Optimizers", torch.optim.SGD, "step", nothing),
        ("Optimizers", torch.optim.Adam, "step", nothing),
        ("Optimizers", LARS, "update", nothing),
        ("Optimizers", Lamb, "update", nothing),
        ("Optimizers", optimizers, "_groups", lambda model, weight_decay: [{"params": list(model.parameters())}]),
        ("Expected loss, sampled with the optimizer sgd", torch.optim.SGD, "step", nothing),
    ],
)  # fmt: skip
def test_a_changed_part_fails(
    monkeypatch: pytest.MonkeyPatch, topic: str, owner: Any, name: str, replacement: Any
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    assert failures(topic)


@pytest.mark.parametrize(
    ("optimizer", "setting", "value"),
    [("sgd", "momentum", 0.8), ("adam", "betas", (0.8, 0.999)), ("adamw", "betas", (0.9, 0.99)), ("lars", "momentum", 0.8),
     ("lamb", "betas", (0.9, 0.99)), ("lamb", "eps", 0.1)],
)  # fmt: skip
def test_a_changed_default_of_an_optimizer_fails(
    monkeypatch: pytest.MonkeyPatch, optimizer: optimizers.Name, setting: str, value: Any
) -> None:
    settings = {**optimizers.SETTINGS[optimizer], setting: value}
    monkeypatch.setitem(optimizers.SETTINGS, optimizer, settings)  # type: ignore[arg-type]
    assert any(each.startswith(optimizer) for each in failures("Optimizers"))
