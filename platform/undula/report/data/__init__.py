"""Figures of a run, computed from its ledger: summary, goodput, cost and certificate."""
