"""Reading of settings: names of other libraries, YAML files, command lines, and the help text."""
