using EnsembleODE: Field, Kind, Trajectories, ode_function, scratch, shared_numbers, start

# A function as Python prints it.
const NETWORK = """
const TABLE_NAME = Int64[$(join(39:-1:0, ", "))]
function NAME(out, u, p, t)
    table = TABLE_NAME
    (work1,) = p.work.f
    @inbounds begin
        mul!(view(work1, 1:40), transpose(reshape(view(p.shared, 1:1600), 40, 40)), view(u, 1:40))
        x1 = 0.0
        @simd for i1 in 0:39
            x1 = x1 + work1[i1 + 1]
        end
        for i2 in 0:39
            x2 = Primitives.tanh(work1[table[i2 + 1] + 1])
            out[i2 + 1] = ((p.own[1] * x2) - u[i2 + 1]) + (x1 * Primitives.integer_pow(t, Val(3)))
        end
    end
    return nothing
end
"""

lorenz_ensemble(T = Float64; own = T[20 28], shared = T[10, 8 / 3]) = Trajectories(;
    u0 = T[1, 0, 0], own, shared, t0 = T[0], t1 = T[1], times = nothing, counts = nothing,
    abstol = T[1e-6], reltol = T[1e-6], dt = nothing,
)

"""How many bytes a call allocates once the function is compiled."""
allocated(f::F, args::Vararg{Any,K}) where {F,K} = (f(args...); @allocated f(args...))

@testset "small: static, and nothing is allocated" begin
    field = Field(defined(LORENZ), nothing, nothing, nothing, false, (;))
    ens = lorenz_ensemble()
    kind = Kind(ens, field)
    u0, span, p = start(ens, kind, field, shared_numbers(ens, kind), 2)
    @test isbits((u0, span, p))
    @test u0 === SVector(1.0, 0.0, 0.0) && span === (0.0, 1.0)
    @test p.own === SVector(28.0) && p.shared === SVector(10.0, 8 / 3)
    @test allocated(field.f, u0, p, 0.0) == 0
    @test @inferred(field.f(u0, p, 0.0)) === SVector(-10.0, 28.0, 0.0)
    @test allocated(ode_function(field), u0, p, 0.0) == 0
    # For a GPU kernel all vectors are static, whatever their sizes.
    large = lorenz_ensemble(; shared = collect(1.0:100.0))
    on_gpu = Kind(large, field; isbits = true)
    @test isbits(start(large, on_gpu, field, shared_numbers(large, on_gpu), 1))
    # Elsewhere all trajectories share large parameters without a copy.
    kind = Kind(large, field)
    numbers = last(start(large, kind, field, shared_numbers(large, kind), 1))
    @test numbers.shared === large.shared && isbits(numbers.own)
end

@testset "large: in place, with scratch memory of its own" begin
    field = Field(defined(NETWORK), nothing, nothing, nothing, true, (; f = ((Float64, 40),)))
    weights = [sin(i + 2j) for i in 1:40, j in 1:40]
    ens = Trajectories(;
        u0 = [cos(i * j) for i in 1:40, j in 1:2], own = [1.0 2.0], shared = vec(weights),
        t0 = [0.0], t1 = [1.0], times = nothing, counts = nothing, abstol = [1e-6],
        reltol = [1e-6], dt = nothing,
    )
    kind = Kind(ens, field)
    u0, _, p = start(ens, kind, field, shared_numbers(ens, kind), 2)
    @test u0 == ens.u0[:, 2] && u0 isa Vector && p.own == [2.0]
    out = similar(u0)
    @test allocated(field.f, out, u0, p, 0.5) == 0
    w = weights' * u0
    @test out ≈ 2 .* tanh.(reverse(w)) .- u0 .+ 0.125 * sum(w)
    # No trajectory shares memory with another one, or with the ensemble.
    other = start(ens, kind, field, shared_numbers(ens, kind), 2)
    memory = (u0, p.own, only(p.work.f), other[1], other[3].own, only(other[3].work.f), ens.u0)
    @test allunique(pointer.(memory)) && other[1] !== u0
end

@testset "definitions" begin
    d = definition("NAME(u, p, t) = u + t")
    f = defined(d)
    @test f === defined(d)
    # The source is sent once; after that the name is enough.
    @test EnsembleODE.define(d["name"], nothing, [1]) === nothing
    # A definition that failed is tried again.
    for _ in 1:2
        @test_throws "as it is run" EnsembleODE.define("f_bad", "error(\"as it is run\")", [1])
        @test !isdefined(EnsembleODE.Fields, :f_bad)
    end
end

@testset "the golden files of the printer" begin
    folder = joinpath(@__DIR__, "..", "..", "tests", "engines", "julia", "golden")
    files = isdir(folder) ? readdir(folder; join = true) : String[]
    for file in files
        source = read(file, String)
        name = String(match(r"^function (\w+)\("m, source)[1])
        EnsembleODE.define(name, source, [1])
        f = Base.invokelatest(getproperty, EnsembleODE.Fields, Symbol(name))
        u, p = rand(1000), (own = rand(5000), shared = rand(5000), forward = t -> rand(1000),
                            work = (; f = (rand(10_000), zeros(Int, 10_000))))
        if Base.invokelatest(hasmethod, f, NTuple{4,Any})
            out = fill(NaN, 1000)
            Base.invokelatest(f, out, u, p, 0.5)
            @test !isnan(out[1])
        else
            @test Base.invokelatest(f, u, p, 0.5) isa Union{SVector,SMatrix}
        end
    end
end
