"""What the benchmarks have in common: what is solved, by whom, how it is timed and reported."""
