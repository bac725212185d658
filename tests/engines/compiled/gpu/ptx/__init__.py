"""An interpreter of PTX on this computer's CPU, for tests without a GPU.

The interpreter is strict. These are errors: an unknown instruction; an access outside of all
buffers; an access that is not aligned; a read of memory that wasn't written; a write to an operand;
and an access by one thread to memory that another has written, since the threads of our kernels
don't wait for each other.

- `parsing.py`: from text to functions and their blocks.
- `arithmetic.py`: the results of instructions, on NumPy arrays with an entry for each thread.
- `memory.py`: the memory of a launch.
- `running.py`: the threads of a launch.
- `xla.py`: XLA's custom call for PTX, run by the interpreter.

The semantics of instructions are those of NVIDIA's "Parallel Thread Execution ISA" (version 8.7:
https://docs.nvidia.com/cuda/parallel-thread-execution).
"""
