"""Parsing of settings in YAML files and on command lines, which can also use the names of other libraries."""
