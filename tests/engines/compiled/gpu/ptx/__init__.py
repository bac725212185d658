"""PTX run on this computer's CPU, for want of a GPU: an interpreter for tests.

It is strict. An instruction that it doesn't know is an error, and so is an access outside of all
buffers, one that is not aligned, a read of what nobody wrote, a write to an operand, and an access
by one thread to what another has written, as threads of our kernels wait for nobody.

- `parsing.py`: from text to functions and their blocks.
- `arithmetic.py`: what instructions compute, on NumPy arrays with an entry a thread.
- `memory.py`: the memory of a launch.
- `running.py`: the threads of a launch.
- `xla.py`: XLA's custom call for PTX, run so.

What instructions do is as NVIDIA's "Parallel Thread Execution ISA" has it (version 8.7:
https://docs.nvidia.com/cuda/parallel-thread-execution).
"""
