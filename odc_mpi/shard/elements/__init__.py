"""The numbers that gradients are pushed and added up as: floating-point, or 64-bit fixed-point."""
