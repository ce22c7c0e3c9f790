"""S3 servers that differ in what they accept: the form of ETags in If-Match, and the region. Each is a proxy in front of moto's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

from faulty_s3 import PassOn, Proxy, serving

Takes = Literal["quoted", "bare", "ignored", "refused"]
"""Treatment of If-Match. `quoted`: an ETag without quotes is an invalid request, as for Cloudflare R2. `bare`: an ETag with quotes differs
from that of every object. `ignored`: conditions are always true. `refused`: they are not implemented."""


class StrictS3(Proxy):
    """Proxy in front of an S3 server.

    Attributes:
        conditions: Values of If-Match of the requests so far.
        authorizations: Values of Authorization of the requests so far.
        region: Region of all buckets. Requests that are signed for another one are refused with a redirection to it; None accepts any.
        regions: Regions of single buckets, which come before `region`.
    """

    def __init__(self, upstream: str, takes: Takes = "quoted", region: str | None = None):
        super().__init__(upstream, _Strict)
        self.takes, self.region = takes, region
        self.regions: dict[str, str] = {}
        self.conditions: list[str] = []
        self.authorizations: list[str] = []


@contextmanager
def strict_s3(upstream: str, takes: Takes = "quoted", region: str | None = None) -> Iterator[StrictS3]:
    """Start a server in this process. Its `url` is the value for AWS_ENDPOINT_URL."""
    with serving(StrictS3(upstream, takes, region)) as server:
        yield server


class _Strict(PassOn):
    server: StrictS3

    def pass_on(self) -> None:
        bucket = urlsplit(self.path).path.split("/")[1]
        region, signature = self.server.regions.get(bucket, self.server.region), self.headers.get("Authorization", "")
        self.server.authorizations.append(signature)
        if region and signature and f"/{region}/s3/" not in signature:
            self._refuse(301, "PermanentRedirect", [("x-amz-bucket-region", region)])
        elif self._is_accepted():
            super().pass_on()

    def _is_accepted(self) -> bool:
        """Check the condition of a request and refuse it, or change it to the form that the server behind takes."""
        etag = self.headers.get("If-Match")
        if etag is None:
            return True
        self.server.conditions.append(etag)
        is_quoted = etag.startswith('"') and etag.endswith('"')
        del self.headers["If-Match"]
        match self.server.takes:
            case "quoted" if not is_quoted:
                self._refuse(400, "InvalidArgument")
            case "bare" if is_quoted:
                self._refuse(412, "PreconditionFailed")
            case "refused":
                self._refuse(501, "NotImplemented")
            case "ignored":
                return True
            case _:
                self.headers["If-Match"] = etag if is_quoted else f'"{etag}"'
                return True
        return False

    def _refuse(self, status: int, code: str, headers: list[tuple[str, str]] | None = None) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        if length := int(self.headers.get("Content-Length") or 0):
            self.rfile.read(length)
        self.answer(status, [("Content-Type", "application/xml"), *(headers or [])], body)
