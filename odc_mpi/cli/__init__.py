"""Command line: the parser and exit codes (`main`), one module per command, and options shared by commands."""
