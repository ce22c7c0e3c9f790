"""Everything that uses private API of Ray. No other package may."""
