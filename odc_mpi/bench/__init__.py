"""What the parts of the runtime achieve on this machine, beside what else there is."""
