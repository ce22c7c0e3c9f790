"""What a run's ledger says, for people: figures, tables in the terminal, a page for the browser."""
