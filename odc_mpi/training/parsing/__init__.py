"""Reading of settings from YAML files and command lines, also under their names in other libraries."""
