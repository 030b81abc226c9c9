"""Command line. `main` defines the parser and the exit codes. Each command has a module with its options and `run`."""
