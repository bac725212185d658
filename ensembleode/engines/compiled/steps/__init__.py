"""The description of a kernel, and the equations, steps and saved rows that are written from it."""
