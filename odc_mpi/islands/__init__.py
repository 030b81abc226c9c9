"""Training on islands that synchronize seldom: encodings of the differences, and decisions about synchronization."""
