"""Before the first step: settings that depend on the machine, the start-up lines, and the dry run."""
