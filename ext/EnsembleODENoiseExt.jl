# Julia looks for an extension's code here and nowhere else.
Base.include(@__MODULE__, "../julia/ext/EnsembleODENoiseExt.jl")
