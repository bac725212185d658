# Julia 1.10 looks for a package's code here and nowhere else (`entryfile` is Julia 1.11's).
Base.include(@__MODULE__, "../julia/src/EnsembleODE.jl")
