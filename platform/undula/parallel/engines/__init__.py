"""Engines: one contract for whatever places a model, runs its backward pass and steps its optimizer."""
