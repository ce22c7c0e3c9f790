"""The command `undula`, with one module per subcommand, and the command line of job scripts."""
