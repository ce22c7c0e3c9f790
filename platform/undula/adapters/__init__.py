"""Trainers of other libraries, whose scripts train under the loop of a run with few changes."""
