"""Driver process of a job or a study: its connection to Ray, its checks before any worker starts, and the launch of training."""
