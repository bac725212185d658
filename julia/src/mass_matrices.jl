# The equations `M du/dt = f(u, p, t)`. The rows of zeros of `M` are algebraic equations.

"""The mass matrix as it is held for SciML: some methods take only matrices of type `Diagonal`."""
mass_matrix(ens::Trajectories, kind::Kind) = mass_matrix(ens.mass, kind.u)
mass_matrix(::Nothing, size) = nothing
mass_matrix(mass::Matrix, size) =
    LinearAlgebra.isdiag(mass) ? Diagonal(held(LinearAlgebra.diag(mass), size)) :
    full(mass, size)

full(mass, ::Nothing) = mass
full(mass, ::Val{N}) where {N} = SMatrix{N,N,eltype(mass)}(mass)

"""Which equations are algebraic."""
algebraic(mass::Diagonal) = map(iszero, mass.diag)
algebraic(mass::AbstractMatrix) = map(row -> all(iszero, row), eachrow(mass))
algebraic(mass) = (false,)

is_singular(mass) = any(algebraic(mass))
is_singular(::Nothing) = false

"""
    is_inconsistent(f, u, p, t, abstol, norm)

Whether the algebraic equations of the SciML function `f` don't hold to `abstol`. A residual that is
NaN is no such finding: it makes the trajectory unstable.
"""
function is_inconsistent(f, u, p, t, abstol, norm)
    is_singular(f.mass_matrix) || return false
    residual = SciMLBase.isinplace(f) ? (out = similar(u); f(out, u, p, t); out) : f(u, p, t)
    return norm(ifelse.(algebraic(f.mass_matrix), residual, zero(eltype(u))) ./ abstol, t) > 1
end

is_inconsistent(integrator) = is_inconsistent(
    integrator.f, integrator.u, integrator.p, integrator.t, integrator.opts.abstol,
    integrator.opts.internalnorm,
)
