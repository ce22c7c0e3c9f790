"""Experiment trackers such as MLflow and W&B, which receive each step of a run exactly once from a thread of the driver."""
