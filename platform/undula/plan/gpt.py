"""Shape of a decoder-only transformer of a given size, and how long such a model usually trains. Pure.

The architecture is that of GPT-2 and GPT-3: learned positions, layers with attention and a perceptron four times as wide, biases
everywhere, and an output that shares the weights of the embedding.
"""

import math
from dataclasses import dataclass

from undula.errors import SpecError

HEAD = 64
"""Least width of an attention head."""
TOKENS_A_PARAMETER = 20
"""Tokens for each parameter of a model that is as good as any that costs as much (Hoffmann et al. 2022, arXiv:2203.15556)."""
FURTHEST = 0.2
"""Largest difference between the size of a given shape and the size asked for, relative to the latter."""


@dataclass(frozen=True)
class Known:
    """A published model."""

    title: str
    parameters: float
    layers: int
    batch_tokens: int
    """Number of tokens of a step."""


GPT3 = (
    Known("GPT-3 125M", 125e6, 12, 2**19),
    Known("GPT-3 350M", 350e6, 24, 2**19),
    Known("GPT-3 760M", 760e6, 24, 2**19),
    Known("GPT-3 1.3B", 1.3e9, 24, 2**20),
    Known("GPT-3 2.7B", 2.7e9, 32, 2**20),
    Known("GPT-3 6.7B", 6.7e9, 32, 2**21),
    Known("GPT-3 13B", 13e9, 40, 2**21),
    Known("GPT-3 175B", 175e9, 96, 3 * 2**20),
)
"""Models of Brown et al. 2020 (arXiv:2005.14165), table 2.1. Their batches, 0.5 to 3.2 million tokens, are rounded to powers of two or
three times one."""


@dataclass(frozen=True)
class Gpt:
    """Shape of a model."""

    layers: int
    width: int
    context: int
    """Tokens of a sequence."""
    vocabulary: int

    @property
    def heads(self) -> int:
        """Number of attention heads: as many as divide the width into parts of at least HEAD."""
        return next(count for count in range(max(self.width // HEAD, 1), 0, -1) if self.width % count == 0)

    @property
    def parameters(self) -> int:
        """Number of parameters: each layer has 12 matrices of width x width, and 13 vectors of biases and norms."""
        layer = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.context) * self.width + self.layers * layer + 2 * self.width


def nearest(parameters: float) -> Known:
    """Return the published model that is nearest in size, by ratio."""
    return min(GPT3, key=lambda known: abs(math.log(known.parameters / parameters)))


def gpt_of(parameters: float, layers: int | None, width: int | None, context: int, vocabulary: int) -> Gpt:
    """Return a shape with about as many parameters as asked for.

    The number of layers is that of the nearest published model; smaller and larger models than all of these have layers by the cube root
    of the size, which keeps the ratio of width to layers. The width follows from parameters = 12 x layers x width^2 (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1) with embeddings added. It is a multiple of 64, or of 16 if it is below 512.

    Args:
        parameters: Number of parameters.
        layers: Number of layers; None for the usual one.
        width: Width; None for that which follows.
        context: Tokens of a sequence.
        vocabulary: Number of tokens that the embedding knows.

    Raises:
        SpecError: There is no such shape.
    """
    if layers and width:
        given = Gpt(layers, width, context, vocabulary)
        if abs(given.parameters / parameters - 1) > FURTHEST:
            raise SpecError(
                f"command line: --layers {layers} and --width {width} make {given.parameters:.3g} parameters, not {parameters:.3g}; "
                "remove one of them, or change --parameters"
            )
        return given
    if width:
        room = parameters - (vocabulary + context) * width
        layers = round(room / (12 * width**2))
    elif not layers:
        known = nearest(parameters)
        is_beyond = not GPT3[0].parameters <= parameters <= GPT3[-1].parameters
        scale = (parameters / known.parameters) ** (1 / 3) if is_beyond else 1.0
        layers = max(round(known.layers * scale), 1)
    if not width:
        half = (vocabulary + context) / (24 * layers) if layers else 0.0
        exact = math.sqrt(half**2 + parameters / (12 * max(layers, 1))) - half
        unit = 64 if exact >= 512 else 16
        width = round(exact / unit) * unit
    if layers < 1 or width < 1:
        raise SpecError(
            f"command line: --parameters {parameters:.3g} is less than embeddings of {vocabulary:,} tokens and a layer need; give more, or "
            "a smaller --vocabulary or --width"
        )
    return Gpt(layers, width, context, vocabulary)
