"""The functions that were translated from JAX, by the names that Python gives them."""
module Fields

using LinearAlgebra: mul!, transpose
using StaticArrays: SMatrix, SVector
using ..Primitives: Primitives

end

"""The names of the functions that each process has."""
const DEFINED = Dict{Int,Set{String}}()

"""The code of each function: Python sends the code once, and new processes may need it later."""
const CODE = Dict{String,Expr}()

"""
Define a function in those of the processes that don't have it. A name never stands for two sources:
it contains a hash of the source.
"""
function define(name::String, source::Union{String,Nothing}, processes)
    missing_in = filter(i -> !(name in get!(DEFINED, i, Set{String}())), collect(Int, processes))
    isempty(missing_in) && return nothing
    code = get!(() -> Meta.parseall(source), CODE, name)
    for i in missing_in
        if i == Distributed.myid()
            Core.eval(Fields, code)
        else
            Distributed.remotecall_eval(Fields, [i], code)
        end
        push!(DEFINED[i], name)
    end
    return nothing
end

"""
    Field(f, jac, tgrad, g, in_place, work)

A right-hand side with its derivatives, and the diffusion of a stochastic problem (`nothing` where
they are not given). `work`: the scratch memory of each function, as pairs of an element type and a
length.
"""
struct Field{F,J,D,G,W}
    f::F
    jac::J
    tgrad::D
    g::G
    in_place::Bool
    work::W
end

"""The right-hand side for SciML, with a mass matrix, or `nothing` for the identity."""
function ode_function(field::Field, mass_matrix = nothing)
    known = (; jac = field.jac, tgrad = field.tgrad)
    mass_matrix === nothing || (known = (; known..., mass_matrix))
    return ODEFunction{field.in_place,SciMLBase.FullSpecialize}(field.f; known...)
end

"""Scratch memory for one trajectory."""
scratch(field::Field) = map(field.work) do sizes
    map(((type, n),) -> Vector{type}(undef, n), sizes)
end
