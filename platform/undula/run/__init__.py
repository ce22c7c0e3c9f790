"""Inside a worker: the training loop that the user's script drives, and the engine beneath it."""
