"""Loading of a job's YAML into a spec of checked dataclasses, with the origin of each value."""
