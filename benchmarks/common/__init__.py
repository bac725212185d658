"""What the benchmarks share: the tasks, the contenders, timing and reports."""
