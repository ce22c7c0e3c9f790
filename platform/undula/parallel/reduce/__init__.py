"""Accumulators of gradients: sums in buckets, exact sums, Adasum, and Horovod's reduction."""
