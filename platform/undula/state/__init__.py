"""The run directory: durable checkpoints, the ledger of steps and events, and the form of the state that they store."""
