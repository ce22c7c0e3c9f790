"""Integration with Ray and Ray Train. This is the only package that uses Ray's private API."""
