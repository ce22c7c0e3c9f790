"""Tests of the shape of a model by its size."""

import pytest

from undula.errors import SpecError
from undula.plan.gpt import GPT3, Gpt, gpt_of, nearest

CONTEXT, VOCABULARY = 2048, 50257


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(Gpt(12, 768, 1024, VOCABULARY), 124_439_808), (Gpt(48, 1600, 1024, VOCABULARY), 1_557_611_200)],
    ids=["GPT-2 small", "GPT-2 XL"],
)
def test_shapes_have_the_published_numbers_of_parameters(shape: Gpt, parameters: int) -> None:
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("parameters", "layers", "width"),
    [
        (125e6, 12, 768),
        (350e6, 24, 1024),
        (760e6, 24, 1536),
        (1.3e9, 24, 2048),
        (2.7e9, 32, 2560),
        (13e9, 40, 5120),
        (175e9, 96, 12288),
    ],
)
def test_the_usual_shapes_are_those_of_gpt_3(parameters: float, layers: int, width: int) -> None:
    """The width of its 13 B model is printed as 5,140, which its heads of 128 do not divide."""
    assert gpt_of(parameters, None, None, CONTEXT, VOCABULARY) == Gpt(layers, width, CONTEXT, VOCABULARY)


@pytest.mark.parametrize("parameters", [1e7, 124e6, 1.5e9, 7e9, 70e9, 1e12])
def test_the_size_is_within_two_percent_of_what_was_asked_for(parameters: float) -> None:
    shape = gpt_of(parameters, None, None, CONTEXT, VOCABULARY)
    assert shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.width % shape.heads == 0


def test_what_is_given_decides_and_the_rest_follows() -> None:
    assert gpt_of(7e9, 16, None, CONTEXT, VOCABULARY) == Gpt(16, 5888, CONTEXT, VOCABULARY)
    assert gpt_of(7e9, None, 4096, CONTEXT, VOCABULARY) == Gpt(34, 4096, CONTEXT, VOCABULARY)
    assert gpt_of(7e9, 32, 4096, CONTEXT, VOCABULARY).parameters == 6_658_404_352


def test_smaller_models_than_all_known_ones_keep_the_ratio_of_width_to_layers() -> None:
    small = gpt_of(10e6, None, None, 256, 256)
    assert (small.layers, small.width, small.heads) == (5, 400, 5)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"--layers 2 and --width 64 make 3.45e\+06 parameters, not 7e\+09"):
        gpt_of(7e9, 2, 64, CONTEXT, VOCABULARY)
    with pytest.raises(SpecError, match=r"is less than embeddings of 50,257 tokens and a layer need"):
        gpt_of(1e5, None, None, CONTEXT, VOCABULARY)
    with pytest.raises(SpecError, match=r"is less than embeddings of 50,257 tokens and a layer need"):
        gpt_of(1e6, None, 4096, CONTEXT, VOCABULARY)


def test_the_nearest_model_is_that_of_the_nearest_ratio() -> None:
    assert nearest(7e9).title == "GPT-3 6.7B"
    assert nearest(1e15) is GPT3[-1]
