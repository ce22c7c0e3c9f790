"""Random keys for the plan: stable 64-bit keys from names and integers, and permutations of which any place can be asked for."""

from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))
_ROUNDS = 16  # even; with fewer, pairs of numbers are not independent in permutations of fewer than ten

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]


def key64(*parts: int | str) -> int:
    """A 64-bit key that depends on every part and on their order; the same on every machine and in every version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: Keys) -> Keys:
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014) of the values and its increment, elementwise."""
    with np.errstate(over="ignore"):
        mixed = values + _MIX[2]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        return mixed ^ (mixed >> np.uint64(31))


def subkeys(key: int, *parts: ArrayLike) -> Keys:
    """Keys derived from one key and integers, elementwise; shape of the parts, broadcast."""
    keys = np.asarray(key, dtype=np.uint64)
    for part in parts:
        keys = mix64(keys ^ mix64(np.asarray(part, dtype=np.int64).astype(np.uint64)))
    return keys


def permuted(places: ArrayLike, sizes: ArrayLike, keys: ArrayLike) -> Ids:
    """What stands at some places of pseudorandom permutations of range(size), without computing the rest of them.

    A generalized Feistel network on Z_a x Z_b with a * b >= size, walked until it falls below the size (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", CT-RSA 2002); a and b are near the square root of the size, so that few places walk twice.

    Args:
        places: in range(size).
        sizes, keys: one for each place, or one for all.

    Returns:
        Shape of the places, broadcast with sizes and keys.
    """
    arrays = np.broadcast_arrays(
        np.asarray(places, dtype=np.uint64), np.asarray(sizes, dtype=np.uint64), np.asarray(keys, dtype=np.uint64)
    )
    shape = arrays[0].shape
    values, size, key = (array.reshape(-1) for array in arrays)
    values = values.copy()
    walking = np.flatnonzero(size > 1)
    while len(walking):
        values[walking] = _encipher(values[walking], size[walking], key[walking])
        walking = walking[values[walking] >= size[walking]]
    return values.astype(np.int64).reshape(shape)


def _encipher(values: Keys, size: Keys, key: Keys) -> Keys:
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    right, left = np.divmod(values, a)
    for number in range(_ROUNDS):
        step = mix64(right ^ mix64(key + np.uint64(number)))
        left, right = right, (left + step % (b if number % 2 else a)) % (b if number % 2 else a)
    return a * right + left


def multiset_digest(ids: Ids) -> int:
    """A 64-bit digest of a multiset of sample ids: the sum modulo 2^64 of a mix of each.

    Sums add up over ranks in any order, and a missing, a repeated or another sample changes them.
    """
    return int(mix64(ids.astype(np.uint64)).sum(dtype=np.uint64))
