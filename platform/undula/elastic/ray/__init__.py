"""The only package that uses private API of Ray."""
