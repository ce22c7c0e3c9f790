"""Clusters: a local one that lives as long as a command, and the way in for jobs."""
