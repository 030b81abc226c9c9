"""Training on islands that synchronize seldom: fragments, their encodings, and the outer optimizer."""
