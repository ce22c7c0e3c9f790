"""Random keys of the plan: stable 64-bit keys from names and integers, and permutations that can be evaluated at single places."""

from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))
_ROUNDS = 16  # must be even; with fewer rounds, pairs of numbers are not independent in permutations of fewer than ten numbers

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]


def key64(*parts: int | str) -> int:
    """Return a 64-bit key that depends on all parts and their order. It is the same on every machine and in every version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: Keys) -> Keys:
    """Add SplitMix64's increment to the values and apply its finalizer (Steele et al., OOPSLA 2014), elementwise."""
    with np.errstate(over="ignore"):
        mixed = values + _MIX[2]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        return mixed ^ (mixed >> np.uint64(31))


def subkeys(key: int, *parts: ArrayLike) -> Keys:
    """Derive keys from one key and integers, elementwise. The result has the broadcast shape of the parts."""
    keys = np.asarray(key, dtype=np.uint64)
    for part in parts:
        keys = mix64(keys ^ mix64(np.asarray(part, dtype=np.int64).astype(np.uint64)))
    return keys


def permuted(places: ArrayLike, sizes: ArrayLike, keys: ArrayLike) -> Ids:
    """Evaluate pseudorandom permutations of range(size) at some places, without computing the other places.

    The permutation is a generalized Feistel network on Z_a x Z_b with a * b >= size, applied until the value is below the size (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Because a and b are close to the square root of the size, few
    places need a second application.

    Args:
        places: Places to evaluate, each in range(size).
        sizes: Size of the permutation, one for each place or one for all.
        keys: Key of the permutation, one for each place or one for all.

    Returns:
        The numbers at these places, in the broadcast shape of the arguments.
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
    """Return a 64-bit digest of a multiset of sample ids: the sum of `mix64` of each id, modulo 2^64.

    The digests of several ranks add up to the digest of all their samples, in any order. A missing, repeated or different sample changes
    the digest.
    """
    return int(mix64(ids.astype(np.uint64)).sum(dtype=np.uint64))
