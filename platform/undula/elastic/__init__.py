"""Trainers on Ray Train whose workers can join and leave during a run. No other package uses Ray's private API."""
