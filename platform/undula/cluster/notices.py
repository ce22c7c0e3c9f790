"""Sources of notices that this machine will be preempted: AWS, Google Cloud, Azure, and a file for everything else."""

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from undula import extensions
from undula.errors import ClusterError, SpecError

GROUP = "undula.notices"
"""Group of the entry points by which packages add sources: functions or classes without arguments that make one."""
TIMEOUT_S = 2.0
AWS_POLL_S = 5.0
"""Polling interval in seconds, as AWS recommends (User Guide, Spot instance interruption notices)."""
AZURE_POLL_S = 1.0
"""Polling interval in seconds, as Azure recommends (Scheduled Events for Linux VMs). Azure's notice is 30 s."""
FILE_POLL_S = 1.0
GCP_NOTICE_S = 30.0
"""Seconds between Google Cloud's notice and the end of the machine (Spot VMs, preemption process)."""
GCP_WAIT_S = 3
"""Seconds for which Google's server delays its answer while the value does not change. Meanwhile the watcher does not react to anything
else, such as a signal."""
LAST_S = 1e11
"""Latest valid deadline in seconds since the epoch, in the year 5138."""
TOKEN_TTL_S = 21600
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without a proxy, because a proxy would return the metadata of another machine."""


@dataclass(frozen=True)
class Notice:
    """Advance notice that this machine will be preempted."""

    reason: str
    deadline: float | None
    """Time at which the machine ends, in seconds since the epoch; None if the cloud does not announce it."""


class Unreadable(Exception):
    """Error that a source did not answer as its cloud documents. The message describes the problem."""


class Source(Protocol):
    """Source of notices."""

    name: str
    pause_s: float
    """Time between two polls in seconds."""

    def poll(self) -> Notice | None:
        """Return the current notice, or None if there is none.

        Raises:
            Unreadable: The source could not be read.
        """
        ...


class Aws:
    """AWS's instance metadata service, version 2, with session tokens.

    Source: Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations" and "Use the Instance
    Metadata Service".

    Args:
        url: URL of the service.
        with_rebalance: Whether a rebalance recommendation counts as a notice. It has no deadline, and a preemption may not follow.
    """

    pause_s = AWS_POLL_S

    def __init__(self, url: str = "http://169.254.169.254", with_rebalance: bool = False):
        self.name = f"AWS ({url})"
        self._url = url
        self._with_rebalance = with_rebalance
        self._token: str | None = None

    def poll(self) -> Notice | None:
        if body := self._read("spot/instance-action"):
            action, when = _fields(body, "action", "time")
            return Notice(f"AWS will {action} this instance", _iso(when))
        if self._with_rebalance and (body := self._read("events/recommendations/rebalance")):
            (when,) = _fields(body, "noticeTime")
            return Notice(f"AWS has recommended at {when} to leave this instance", None)
        return None

    def _read(self, path: str) -> bytes | None:
        """Read a path of the service and return its content, or None if it does not exist. An expired token is renewed once."""
        for _ in range(2):
            if self._token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
                self._token = _text(f"{self._url}/latest/api/token", ttl, method="PUT")
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, body, _ = ask(f"{self._url}/latest/meta-data/{path}", headers)
            if status == 200:
                return body
            if status == 404:
                return None
            self._token = None
            if status != 401:
                break
        raise Unreadable(f"status {status} for {path}")


class Gcp:
    """Google Cloud's metadata server, which can delay an answer until the value changes.

    Source: Compute Engine documentation, "Detect if a VM was preempted" and "Query metadata: wait for change".
    """

    pause_s = 0.2

    def __init__(self, url: str = "http://metadata.google.internal"):
        self.name = f"Google Cloud ({url})"
        self._url = f"{url}/computeMetadata/v1/instance/preempted"
        self._etag: str | None = None

    def poll(self) -> Notice | None:
        etag, self._etag = self._etag, None
        waiting = f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={urllib.parse.quote(etag)}" if etag else ""
        status, body, headers = ask(
            self._url + waiting, {"Metadata-Flavor": "Google"}, TIMEOUT_S + (GCP_WAIT_S if waiting else 0)
        )
        if status != 200 or body not in (b"TRUE", b"FALSE"):
            raise Unreadable(f"status {status}, {body[:40]!r} for preempted")
        self._etag = headers.get("ETag")
        return Notice("Google Cloud preempts this machine", time.time() + GCP_NOTICE_S) if body == b"TRUE" else None


class Azure:
    """Scheduled events of Azure's instance metadata service.

    Source: Azure documentation, "Scheduled Events for Linux VMs", version 2020-07-01.
    """

    pause_s = AZURE_POLL_S

    def __init__(self, url: str = "http://169.254.169.254"):
        self.name = f"Azure ({url})"
        self._url = f"{url}/metadata"
        self._machine: str | None = None

    def poll(self) -> Notice | None:
        if self._machine is None:
            where = f"{self._url}/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = _text(where, {"Metadata": "true"})
        status, body, _ = ask(f"{self._url}/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        if status != 200:
            raise Unreadable(f"status {status} for scheduledevents")
        for event in _listed(_fields(body, "Events")[0], of=dict):
            if event.get("EventType") == "Preempt" and self._machine in _listed(event.get("Resources"), of=str):
                return Notice("Azure evicts this machine", _http_date(event.get("NotBefore") or ""))
        return None


class File:
    """File whose existence is a notice. It is empty or contains `{"deadline_s": 30}` or `{"deadline": SECONDS SINCE THE EPOCH}`."""

    pause_s = FILE_POLL_S

    def __init__(self, path: Path):
        self.name = f"the file {path}"
        self._path = path

    def poll(self) -> Notice | None:
        try:
            body, since = self._path.read_bytes(), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unreadable(str(error.strerror)) from error
        content = _parsed(body) if body.strip() else {}
        reason = f"the file {self._path} exists"
        if "deadline_s" in content:
            return Notice(reason, _deadline(content["deadline_s"], since))
        return Notice(reason, _deadline(content["deadline"]) if "deadline" in content else None)


SOURCES: Mapping[str, Callable[..., Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
VENDORS = {"Amazon EC2": "aws", "Google": "gcp", "Microsoft Corporation": "azure"}
"""Name of the source in SOURCES, by the vendor in the machine's firmware."""


def source_here(firmware: Path = Path("/sys/class/dmi/id/sys_vendor"), with_rebalance: bool = False) -> Source:
    """Return the source of the cloud that this machine belongs to.

    Raises:
        ClusterError: The machine does not belong to a supported cloud.
    """
    vendor = _firmware(firmware) or "unknown"
    if vendor == "Xen" and "amazon" in _firmware(firmware.with_name("bios_version")):
        vendor = "Amazon EC2"  # an instance type of before 2018, such as p3
    if vendor not in VENDORS:
        raise ClusterError(
            f"this machine does not belong to a supported cloud (its vendor is {vendor}); set --source to one of {', '.join(SOURCES)} or "
            "file:PATH"
        )
    return Aws(with_rebalance=with_rebalance) if VENDORS[vendor] == "aws" else SOURCES[VENDORS[vendor]]()


def _firmware(file: Path) -> str:
    """Return what the firmware says in a file; empty if it says nothing."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def source_named(name: str | None, url: str | None = None, with_rebalance: bool = False) -> Source:
    """Return the source that a user has selected.

    Args:
        name: Name of a source in SOURCES or of one that another package adds, or file:PATH. By default it is the source of the cloud that
            this machine belongs to.
        url: Address of the cloud's metadata server. By default it is the cloud's usual address.
        with_rebalance: Whether a rebalance recommendation of AWS counts as a notice.

    Raises:
        SpecError: No source has this name.
        ClusterError: No name is given and the machine does not belong to a supported cloud.
    """
    if name is None:
        return source_here(with_rebalance=with_rebalance)
    if name.startswith("file:"):
        return File(Path(name.removeprefix("file:")))
    if name not in SOURCES:
        if make := extensions.load(GROUP, {}, name):
            source: Source = make()
            return source
        known = ", ".join([*SOURCES, *extensions.names(GROUP, {})])
        raise SpecError(f"command line: --source is {name}; set it to one of {known} or file:PATH")
    where = {"url": url.rstrip("/")} if url else {}
    return Aws(with_rebalance=with_rebalance, **where) if name == "aws" else SOURCES[name](**where)


def ask(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S, method: str = "GET"
) -> tuple[int, bytes, Message]:
    """Send a request and return the status, body and headers of the answer.

    Raises:
        Unreadable: The server did not answer.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            return response.status, response.read(2**20), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b"", error.headers
    except TimeoutError as error:
        raise Unreadable(f"no answer within {timeout_s:g} s") from error
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        late = isinstance(reason, TimeoutError)
        raise Unreadable(f"no answer within {timeout_s:g} s" if late else f"no answer: {reason}") from error


def _text(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    status, body, _ = ask(url, headers, method=method)
    if status != 200:
        raise Unreadable(f"status {status} for {url.partition('?')[0]}")
    text = body.decode(errors="replace").strip()
    if not re.fullmatch(r"[\w.=+/-]+", text):
        raise Unreadable(f"{body[:40]!r} for {url.partition('?')[0]}")
    return text


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise Unreadable(f"{body[:40]!r} instead of a JSON object")
    return parsed


def _fields(body: bytes, *names: str) -> tuple[Any, ...]:
    fields = _parsed(body)
    if missing := [name for name in names if name not in fields]:
        raise Unreadable(f"no {' and no '.join(missing)} in {body[:80]!r}")
    return tuple(fields[name] for name in names)


def _listed(value: Any, of: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
        raise Unreadable(f"{str(value)[:80]!r} instead of a list")
    return value


def _deadline(seconds: Any, since: float = 0.0) -> float:
    """Return a valid deadline in seconds since the epoch; `seconds` counts from `since`."""
    try:
        deadline = since + float(seconds)
    except (TypeError, ValueError, OverflowError):
        deadline = math.nan
    if not 0 < deadline < LAST_S:
        raise Unreadable(f"{str(seconds)[:40]!r} instead of seconds")
    return deadline


def _iso(when: Any) -> float:
    return _timestamp(datetime.fromisoformat, when)


def _http_date(when: Any) -> float | None:
    """Parse a time such as `Mon, 19 Sep 2016 18:29:47 GMT`. An event that is already under way has an empty time, which gives None."""
    return None if when == "" else _timestamp(parsedate_to_datetime, when)


def _timestamp(read: Callable[[str], datetime], when: Any) -> float:
    try:
        parsed = read(str(when))
        return _deadline((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    except (ValueError, TypeError, OverflowError):
        raise Unreadable(f"{str(when)[:40]!r} instead of a time") from None
