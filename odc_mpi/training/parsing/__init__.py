"""Parsing of settings from YAML files and the command line, where names from other libraries are also accepted."""
