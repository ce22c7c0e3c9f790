"""Digest of a model's weights that does not depend on how they are sharded."""

from collections.abc import Mapping
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from undula.state.pieces import Piece

_CHUNK = 2**16
"""Number of elements that are hashed at once, so that intermediate results stay in the processor's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype in which the bits of an element are read, by the size of the element in bytes."""
# The constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_BITS = 0xD1342543DE82EF95 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def additive_digest(pieces: Mapping[str, Piece]) -> int:
    """Return the sum modulo 2^64 of one hash per element.

    The hash of an element depends on the name of its tensor, its place in the whole tensor, and its bits. The digest of a state is
    therefore the sum of the digests of its boxes, each counted once, however the state is divided into boxes. The call waits for the
    device.
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
        hashed += bits[chunk].long() * _BITS  # not in place: 8-byte elements are those of the state itself
        total += _mixed(hashed).sum()
    return int(total.item())


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element as integers, with shape [..., number of integers per element]."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize])


def _places(piece: Piece, width: int) -> Tensor:
    """Return the place in the whole tensor of each integer of `_bits`, with shape [..., width]."""
    device = piece.tensor.device
    shape = (*piece.shape, width)
    places = torch.arange(width, device=device)
    for dimension in reversed(range(len(piece.shape))):
        stride = prod(shape[dimension + 1 :])
        steps = torch.arange(piece.tensor.shape[dimension], device=device) + piece.offsets[dimension]
        places = (steps * stride).view(-1, *[1] * places.dim()) + places
    return places


def _mixed(values: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place."""
    for count, factor in ((30, _MIX_1), (27, _MIX_2)):
        values ^= _shifted(values, count)
        values *= factor
    values ^= _shifted(values, 31)
    return values


def _shifted(values: Tensor, count: int) -> Tensor:
    """Return the values after a logical shift to the right; torch's own shift extends the sign."""
    return (values >> count).bitwise_and_(2 ** (64 - count) - 1)
