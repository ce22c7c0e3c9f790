"""Recovery of a run when its workers change.

The package has snapshots in memory, their replicas on the head node, the restoring of state, and what a worker keeps between two groups.
"""
