"""Command line: `main` has the parser and the exit codes. Every command is a module with its options and `run`."""
