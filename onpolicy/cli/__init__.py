"""The commands of the CLI: one file each, with a `main(argv) -> exit code`."""
