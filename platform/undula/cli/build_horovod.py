"""Command `undula build-horovod`."""

from pathlib import Path

import click

from undula.cli.options import FILE

CACHE = "~/.cache/undula"


@click.command("build-horovod", short_help="Build and install Horovod, for engine: horovod.")
@click.option(
    "--cache", type=FILE, default=CACHE, show_default=True, metavar="FOLDER", help="Folder that keeps the builds."
)
def build_horovod(cache: Path) -> None:
    """Build Horovod for the installed torch, and install it. The first build takes a few minutes.

    Environment variables whose names begin with HOROVOD_ are passed to the build, such as HOROVOD_GPU_OPERATIONS=NCCL for GPUs.
    """
    from undula.cluster.build_horovod import build_horovod as build

    build(cache.expanduser())
