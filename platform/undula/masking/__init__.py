"""Masking of secrets in every text that leaves a process: `values` has those that the user has declared, and the one function `mask`;
`shapes` has the tables of names and forms that give other secrets away; `output` masks what a process prints."""
