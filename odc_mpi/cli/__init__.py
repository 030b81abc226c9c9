"""The command line: `main` has the parser and the exit codes, each command a file with its options and its run."""
