"""Ray clusters: local clusters, job submission, spot notices, prices, and checks of running and configured clusters."""
