"""Masking of secrets in every text that leaves a process: `values` has those that the user has declared, and the one function `mask`;
`names`, `tokens` and `shapes` have the tables of what gives other secrets away; `output` masks what a process prints, and `exceptions` what
it raises."""
