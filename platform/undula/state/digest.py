"""A digest of a model's weights that does not depend on how they are sharded."""

from collections.abc import Mapping
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from undula.state.pieces import Piece

_CHUNK = 2**16
"""Number of elements that are hashed at once, so that what lies between two operations stays in the processor's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types in which the bits of an element of so many bytes are read."""
# The constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_BITS = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def additive_digest(pieces: Mapping[str, Piece]) -> int:
    """The sum modulo 2^64 of a hash of each element: of its tensor's name, its place in the whole tensor, and its bits.

    The digest of a state is the sum of the digests of its boxes, each counted once, for any way to cut it into boxes. Waits for
    the device.
    """
    return sum(_piece_digest(name, piece) for name, piece in pieces.items()) % 2**64


def _piece_digest(name: str, piece: Piece) -> int:
    bits = _bits(piece.tensor.detach())
    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
    places = _places(piece, bits.shape[-1]).flatten()
    bits = bits.flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        hashed = places[chunk] * _GAMMA
        hashed += key
        hashed += bits[chunk].long().mul_(_BITS)
        total += _mixed(hashed).sum()
    return int(total.item())


def _bits(tensor: Tensor) -> Tensor:
    """The bits of each element as integers. Shape [..., integers that an element has]."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize])


def _places(piece: Piece, width: int) -> Tensor:
    """The place of each integer of `_bits` in the whole tensor. Shape [..., width]."""
    device = piece.tensor.device
    shape = (*piece.shape, width)
    places = torch.arange(width, device=device)
    for dimension in reversed(range(len(piece.shape))):
        stride = prod(shape[dimension + 1 :])
        steps = torch.arange(piece.tensor.shape[dimension], device=device) + piece.offsets[dimension]
        places = (steps * stride).view(-1, *[1] * places.dim()) + places
    return places


def _mixed(values: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place."""
    for count, factor in ((30, _MIX_1), (27, _MIX_2)):
        values ^= _shifted(values, count)
        values *= factor
    values ^= _shifted(values, 31)
    return values


def _shifted(values: Tensor, count: int) -> Tensor:
    """A logical shift to the right; that of torch fills in the sign."""
    return (values >> count).bitwise_and_(2 ** (64 - count) - 1)
