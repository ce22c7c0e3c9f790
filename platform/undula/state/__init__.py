"""State that outlives a worker: durable checkpoints and the ledger."""
