"""Command `undula export`."""

from dataclasses import asdict

import click

from undula.cli.options import counted, json_option, print_json, runs_option


@click.command(short_help="Write a run's weights as safetensors files.")
@click.argument("run", metavar="RUN")
@click.option("--out", required=True, metavar="DIR", help="Folder for the files: a path or an s3:// URL.")
@click.option(
    "--which",
    default="last",
    show_default=True,
    metavar="CHECKPOINT",
    help="Checkpoint whose weights are written: best, last, or a number of steps.",
)
@runs_option
@json_option
def export(run: str, out: str, which: str, runs: str | None, as_json: bool) -> None:
    """Write the weights of a run as Hugging Face stores a model: model.safetensors, or several files of up to 5 GB and an index.

    RUN is a name that `undula ls` lists, or the run's directory as a path or an s3:// URL. The names of the weights are those of the
    model's state_dict(), whether or not the model was sharded, compiled or wrapped. Tied weights are written under their first name only.
    No state of the optimizer is written.
    """
    from undula.state.export import export_weights
    from undula.state.locate import locate_run
    from undula.state.weights import parsed_which
    from undula.storage import open_store

    exported = export_weights(locate_run(run, runs), open_store(out), parsed_which(which))
    if as_json:
        print_json(asdict(exported))
        return
    size = f"{exported.bytes / 1e6:,.1f} MB"
    click.echo(f"wrote the weights after step {exported.step} to {out}: {counted(exported.tensors, 'tensor')}, {size}")
    for name in exported.files:
        click.echo(f"  {name}")
    if exported.left_out:
        click.echo(f"not written, because it is no weights: {', '.join(exported.left_out)}")
