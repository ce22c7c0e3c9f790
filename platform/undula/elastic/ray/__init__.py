"""Integration with Ray and Ray Train. This is the only package that uses Ray's private API."""

from undula.errors import require_tested

require_tested("ray")
