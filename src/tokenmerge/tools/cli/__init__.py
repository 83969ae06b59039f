"""The `tokenmerge` command: one file per subcommand, which parses and prints. The work is done elsewhere in `tools`."""
