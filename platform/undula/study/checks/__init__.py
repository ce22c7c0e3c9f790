"""Checks of the self-test: each module yields computed numbers beside the known ones."""
