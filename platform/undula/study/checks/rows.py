"""Result of a check: a computed number beside the known one."""

Row = tuple[str, float, float, float]
"""Name of a check, expected number, computed number, and relative tolerance."""
EXACT = 1e-9
"""Tolerance of checks whose numbers differ only in the rounding of float64."""
