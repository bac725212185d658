"""What goes with the library besides solving: `doctor`, `bench`, citations, the check of columns
and the report of kernels. A module each."""
