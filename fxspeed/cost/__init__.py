"""What a graph costs: memory of a whole step, floating-point operations."""
