"""LLVM IR and machine code from Python. Nothing here knows of differential equations.

- `builder.py`, `values.py`, `branches.py`, `heap.py`, `module.py`: writing functions, lane by lane.
    `writer.py`: writing the code around a kernel.
- `functions/`: elementary functions.
- `machine.py`, `compiler.py`, `object_cache.py`: from IR to machine code, which is kept on disk.
"""
