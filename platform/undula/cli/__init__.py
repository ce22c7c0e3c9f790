"""The command `undula`, with one module per subcommand."""
