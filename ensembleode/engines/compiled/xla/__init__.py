"""Machine code as an operation of JAX, on CPUs and on GPUs.

- `handler.py`, `sharing.py`: a function of LLVM IR as a custom call; its work, shared by threads.
    `call.py`: that as an operation. `stopping.py`: the flag that stops it.
- `entry.py`, `launch.py`, `ptxas.py`: a function as a GPU's kernel, its launch, what it takes.
"""
