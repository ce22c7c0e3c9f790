"""Entry point of `python -m undula.cli`, for a checkout without the command `undula`."""

from undula.cli.main import main

main()
