"""Tests of models whose activations are recomputed in unusual ways: second-order gradients, changes in place, and caches of keys."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from undula.errors import UsageError
from undula.parallel.activations import is_kept, keep_activations
from undula.parallel.spec import ActivationsSpec

POLICIES = {
    **{keep: ActivationsSpec(keep) for keep in ("none", "selective", "sqrt", "every_2")},
    **{f"{keep}, offloaded": ActivationsSpec(keep, offload=True) for keep in ("all", "none")},
}


class Energy(nn.Module):
    """Network whose gradient by its input is part of the loss, as the forces of a potential are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x.sum()


def forces_and_energy(model: nn.Module) -> Tensor:
    x = torch.randn(3, 4, requires_grad=True)
    energy = model(x)
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    (curvature,) = torch.autograd.grad(forces.square().sum(), x, create_graph=True)
    return forces.square().mean() + curvature.square().mean() + energy


class InPlace(nn.Module):
    """Network whose activations replace the results of convolutions and matrix products in place."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(3))
        self.blocks = nn.Sequential(*blocks, nn.Sequential(nn.Linear(4, 4), nn.ELU(inplace=True)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def images(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 3, 4, 4)).square().mean()


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "second order": (Energy, forces_and_energy),
    "in place": (InPlace, images),
}


def gradients(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], spec: ActivationsSpec
) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = make()
    keep_activations(model, spec)
    torch.manual_seed(1)
    loss(model).backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_gradients_of_gradients_or_what_is_changed_in_place(policy: str, loss: str) -> None:
    expected, found = (gradients(*LOSSES[loss], spec) for spec in (ActivationsSpec(), POLICIES[policy]))
    for one, other in zip(found, expected, strict=True):
        assert (one is other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_selective_repeats_an_attention_that_draws_random_numbers() -> None:
    """If it were kept, the dropout after it would draw other numbers in the recomputation."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert is_kept(attention, (None, None, None, None, True, 0.0), {})
    assert not is_kept(attention, (None, None, None, None, True, 0.1), {})
    assert not is_kept(attention, (None, None, None, None, True), {"dropout_p": 0.1})


def decoder(attention: str, use_cache: bool = True) -> Callable[[], LlamaForCausalLM]:
    """Return a function that makes a decoder of Hugging Face. Its config lets it fill a cache of keys and values by default."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    return lambda: LlamaForCausalLM(
        LlamaConfig(**sizes, **layers, use_cache=use_cache, attn_implementation=attention)
    ).train()


def next_tokens(model: nn.Module, **arguments: bool) -> Tensor:
    tokens = torch.randint(0, 50, (2, 8))
    logits = model(input_ids=tokens, **arguments).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", [each for each in POLICIES if not each.startswith("all")])
def test_a_cache_that_a_recomputed_unit_fills_is_refused_by_the_setting_that_prevents_it(
    policy: str, attention: str
) -> None:
    with pytest.raises(UsageError, match=r"^a unit got a DynamicCache .*; set model\.config\.use_cache=False, or"):
        gradients(decoder(attention), next_tokens, POLICIES[policy])
    expected = gradients(decoder(attention, use_cache=False), next_tokens, ActivationsSpec())
    for found in (
        gradients(decoder(attention, use_cache=False), next_tokens, POLICIES[policy]),
        gradients(decoder(attention), lambda model: next_tokens(model, use_cache=False), POLICIES[policy]),
    ):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_a_validation_may_fill_a_cache() -> None:
    model = decoder("sdpa")()
    keep_activations(model, ActivationsSpec("none"))
    with torch.no_grad():
        assert next_tokens(model.eval()).isfinite()
