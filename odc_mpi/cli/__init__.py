"""Command-line interface: parser and exit codes (`main`), one module per command, and shared options (`options`)."""
