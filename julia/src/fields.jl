"""The functions that were translated from JAX, by the names that Python gives them."""
module Fields

using LinearAlgebra: mul!, transpose
using StaticArrays: SMatrix, SVector
using ..Primitives: Primitives

end

"""Which functions each process has been given."""
const DEFINED = Dict{Int,Set{String}}()

"""The code of each function: Python sends it once, processes may be started later."""
const CODE = Dict{String,Expr}()

"""
Define a function in these processes, unless they have it. A name stands for one source: it holds a
hash of it.
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
    Field(f, jac, tgrad, in_place, work)

A right-hand side with its derivatives, `nothing` where there are none. `work` is, by function, how
much scratch memory it needs: pairs of an element type and a length.
"""
struct Field{F,J,G,W}
    f::F
    jac::J
    tgrad::G
    in_place::Bool
    work::W
end

"""The right-hand side for SciML."""
function ode_function(field::Field)
    derivatives = (; jac = field.jac, tgrad = field.tgrad)
    return ODEFunction{field.in_place,SciMLBase.FullSpecialize}(field.f; derivatives...)
end

"""Scratch memory for one trajectory."""
scratch(field::Field) = map(field.work) do sizes
    map(((type, n),) -> Vector{type}(undef, n), sizes)
end
