# Pkg.test() looks for the tests here and nowhere else.
include("../julia/test/runtests.jl")
