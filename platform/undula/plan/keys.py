"""Random keys for the plan: a stable 64-bit key from names and integers, and permutations drawn from it."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def key64(*parts: int | str) -> int:
    """A 64-bit key that depends on every part and on their order; the same on every machine and in every version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """A permutation of range(size), shape [size].

    Sorts the raw output of the Philox counter-based generator (Salmon et al., SC 2011): NumPy keeps raw bit streams stable
    between versions, which it does not promise for `Generator.permutation`.
    """
    draws = np.random.Philox(key=np.array([key, 0], dtype=np.uint64)).random_raw(size)
    return np.argsort(np.atleast_1d(draws), kind="stable").astype(np.int64)


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


def multiset_digest(ids: NDArray[np.int64]) -> int:
    """A 64-bit digest of a multiset of sample ids: the sum modulo 2^64 of SplitMix64's mix of each (Steele et al., OOPSLA 2014).

    Sums add up over ranks in any order, and a missing, a repeated or another sample changes them.
    """
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) + _MIX[2]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
