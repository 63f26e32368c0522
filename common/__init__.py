"""What at least two applications use, or will."""
