"""Entry point of `python -m undula.cli`."""

from undula.cli.main import main

main()
