"""Decisions about nodes and workers. They depend only on the observed cluster and the time, and use neither Ray nor torch."""
