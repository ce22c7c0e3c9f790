"""Sums of gradients: exact ones, and Adasum."""
