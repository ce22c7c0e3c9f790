"""Datasets of a script: the accepted objects, the micro-batches made of their samples, and the processes that load them."""
