"""Command line. `main` has the parser and the exit codes. Each command has a module with its options and `run`."""
