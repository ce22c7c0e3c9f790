"""Files at a URL: a local path or `s3://bucket/prefix`. Every write is atomic.

All requests to S3 go through botocore, so that there is one resolution of credentials, profile, region, endpoint and proxy, which the usual
variables of AWS configure (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, ...). Any S3 server works.
"""

from undula.storage.retries import (
    ChangedError,
    LostCache,
    MissingError,
    Outages,
    Reporter,
    Wait,
    named_errors,
    report_lost_cache,
    temporary_problem,
    waits_reported_to,
    waits_reporter,
)
from undula.storage.s3_requests import MOST_PARTS, PART_BYTES, Bucket, Object, part_size
from undula.storage.store import Entry, Store, open_store, write_file

__all__ = [
    "MOST_PARTS",
    "PART_BYTES",
    "Bucket",
    "ChangedError",
    "Entry",
    "LostCache",
    "MissingError",
    "Object",
    "Outages",
    "Reporter",
    "Store",
    "Wait",
    "named_errors",
    "open_store",
    "part_size",
    "report_lost_cache",
    "temporary_problem",
    "waits_reported_to",
    "waits_reporter",
    "write_file",
]
