"""Pure decisions about nodes and workers: each takes a view of the cluster and the time, and uses neither Ray nor torch."""
