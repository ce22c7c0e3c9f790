"""Training loop of a rank."""
