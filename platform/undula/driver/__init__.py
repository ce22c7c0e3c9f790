"""The driver process of a job or a study: connecting to Ray, checks before any worker starts, and launching the training."""
