"""Engines, which place a model, run its backward passes, reduce its gradients and step its optimizer."""
