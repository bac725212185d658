"""Machine code as an operation of JAX, on CPUs and on GPUs.

- `handler.py`: a function in LLVM IR as a custom call. `sharing.py`: threads that share its work.
    `call.py`: the custom call as an operation. `stopping.py`: the flag that stops a solve.
- `entry.py`, `launch.py`: a function as a GPU's kernel, and its launch. `ptxas.py`: the registers
    and the memory that it takes.
"""
