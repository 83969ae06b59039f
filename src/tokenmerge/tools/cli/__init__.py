"""The `tokenmerge` command, one file for each of its commands."""
