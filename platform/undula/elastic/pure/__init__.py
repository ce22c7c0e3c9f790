"""Decisions about nodes and workers. Pure: what is seen and the time go in, a decision comes out; no Ray, no torch."""
