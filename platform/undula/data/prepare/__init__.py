"""Preparation of data sets: the formats that are read, their conversion and shuffle, the writer, the index and the check."""
