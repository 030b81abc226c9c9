"""Number formats in which gradients are pushed and summed: floating-point or 64-bit fixed-point."""
