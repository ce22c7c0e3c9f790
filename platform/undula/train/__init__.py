"""The training loop of a rank."""
