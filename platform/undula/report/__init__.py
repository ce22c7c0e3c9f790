"""Reports on a run: `data` computes figures from the ledger, `render` shows them in a terminal or a browser."""
