"""A unit of parameters, and which units are ready when."""
