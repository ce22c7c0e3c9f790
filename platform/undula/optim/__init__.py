"""Optimizers by name, and the layer-wise optimizers for large batches."""
