"""ETags: the form in which a server takes them in If-Match, and their comparison.

The standard requires quotes, and some servers refuse the request without them. Others compare the header with an ETag that has none, and a
few know no conditions at all. Which form a server takes shows when it refuses one for an object that has the ETag.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["quoted", "bare", "none"]
_NEXT: dict[Form, Form] = {"quoted": "bare", "bare": "none", "none": "none"}
_forms: dict[str, Form] = {}
"""Form that each endpoint takes, if it does not take the first one."""


def bare(etag: str) -> str:
    """Return an ETag without quotes and without the prefix of a weak one."""
    return etag.removeprefix("W/").strip('"')


def is_same(one: str, other: str) -> bool:
    """Whether two ETags are the same, whatever their quotes and their case are."""
    return bare(one).casefold() == bare(other).casefold()


def etag_of_parts(etags: Sequence[str]) -> str | None:
    """Return the ETag of an object that was sent in parts, given theirs in order; None if these are no MD5 digests, as with KMS."""
    try:
        digests = b"".join(bytes.fromhex(bare(etag)) for etag in etags)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"


def form_for(endpoint: str) -> Form:
    """Return the form in which ETags are sent to an endpoint."""
    return _forms.get(endpoint, "quoted")


def condition(etag: str, form: Form) -> dict[str, str]:
    """Return the parameters of a request that is conditional on an ETag."""
    return {} if form == "none" else {"IfMatch": f'"{bare(etag)}"' if form == "quoted" else bare(etag)}


def refused(endpoint: str, form: Form) -> None:
    """Record that an endpoint has refused a form for an object that has the ETag."""
    if form_for(endpoint) == form:  # another thread may have recorded it
        _forms[endpoint] = _NEXT[form]


def forget_forms() -> None:
    """Drop what is known about the endpoints."""
    _forms.clear()
