"""Sizes of what training keeps, which whoever reckons its memory needs as well."""

BUCKET_BYTES = 25 * 2**20
"""Maximum size of a bucket of gradients of several parameters."""
UPDATES = 4
"""Number of updates that workers of a sharded model keep beside their snapshots, if the job does not set how often these are taken."""
