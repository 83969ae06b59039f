"""The `tokenmerge` command: one file per subcommand, which parses and prints. The rest of `tools` does the work."""
