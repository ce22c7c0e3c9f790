#!/usr/bin/env bash
# The report page is tested in a real browser. Without one its tests skip, and say so.
set -euo pipefail
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian's chromium for the tests of the report page"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null
else
    echo "no chromium found: the tests of the report page will skip (Debian: apt-get install chromium)"
fi
