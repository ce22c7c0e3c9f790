"""The YAML of a job: the spec that composes the dataclasses of all packages, checked strictly, with the origin of each value."""
