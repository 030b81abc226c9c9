"""Parsing of settings from YAML files and the command line, where names of other libraries are also accepted."""
