"""Commands `undula convert ...`."""

from pathlib import Path

import click

from undula.cli.options import FILE, Commands


@click.group(cls=Commands, short_help="Convert configurations of other libraries to JOB.yaml.")
def convert() -> None:
    """Convert configurations of other libraries to the keys of a JOB.yaml."""


@convert.command(short_help="Convert a DeepSpeed configuration to JOB.yaml.")
@click.argument("config", type=FILE, metavar="CONFIG.json")
@click.option(
    "--out", type=FILE, metavar="JOB.yaml", help="File to write, which must not exist.  [default: the terminal]"
)
@click.option(
    "--virtual-workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of virtual workers: the number of GPUs, times gradient_accumulation_steps in stages 2 and 3.  [default: that of the "
    "batch sizes in CONFIG.json, or of 4 GPUs if they do not determine it]",
)
def deepspeed(config: Path, out: Path | None, virtual_workers: int | None) -> None:
    """Write the keys of a JOB.yaml that do what CONFIG.json does in DeepSpeed.

    Comments at the end name each key of CONFIG.json that has no equivalent, with the reason. The file needs a name, and the data if the
    script does not give them. DeepSpeed need not be installed.
    """
    from undula.config.deepspeed import as_yaml, load
    from undula.errors import SpecError

    text = as_yaml(load(config, virtual_workers), config.name)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SpecError(f"command line: --out {out} exists, and is not overwritten; give another file") from None
    except OSError as error:
        raise SpecError(f"command line: cannot write --out {out}: {error.strerror}; give another file") from error
    click.echo(out)
