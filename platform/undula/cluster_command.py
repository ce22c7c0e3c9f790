"""`undula cluster check`: its options and what it prints."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undula.elastic.pure.spec import WorkersSpec


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.yaml", help="as for `ray up`")
    text = "a job that is to run there: whether its workers fit, and its buckets are near"
    parser.add_argument("--job", type=Path, metavar="JOB.yaml", help=text)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from undula.cluster.check import check_cluster, load_cluster, region_of

    config = load_cluster(options.cluster)
    workers, buckets = _of_job(options.job) if options.job else (None, [])
    findings = check_cluster(config, workers, buckets, region_of)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding.message}")
        print(f"{len(findings) or 'no'} finding{'s' if len(findings) != 1 else ''}")
    return int(any(finding.severity == "error" for finding in findings))


def _of_job(path: Path) -> "tuple[WorkersSpec, list[str]]":
    """What its workers need, and the buckets that it reads and writes."""
    from undula.config.job import load_spec

    spec = load_spec(path, []).spec
    data = spec.data
    urls = [
        spec.run_url,
        *(part.url for part in data.mix or ()),
        *(url for url in (data.train, data.validation) if url),
    ]
    return spec.workers, [url.removeprefix("s3://").partition("/")[0] for url in urls if url.startswith("s3://")]
