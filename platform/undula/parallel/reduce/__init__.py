"""Reduction of gradients: sums in buckets, exact sums, and Adasum."""
