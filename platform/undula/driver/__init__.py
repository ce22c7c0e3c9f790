"""The driver process of a job or a study: its connection to Ray, checks before any worker starts, and the launch of a training."""
