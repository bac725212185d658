"""What a kernel computes: its description, and the equations, steps and rows written from it."""
