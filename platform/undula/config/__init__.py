"""A job's YAML: the dataclasses of all packages composed to one spec, checked strictly, with the place of each value."""
