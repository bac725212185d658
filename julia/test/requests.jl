using EnsembleODE: OutputOf, ProblemOf

request(; more...) = (;
    field = linear(), mode = "ends", start = false, maxiters = 1000, trajectories = 1,
    method = named("Tsit5"), place = Dict("name" => "EnsembleSerial"), more...,
)
arrays_of_one() = merge(
    read_by_solve(Float64, 1; u0 = [1.0, 2.0], own = [1.0;;], shared = [1.0]),
    written_by_solve(Float64, 1, 2, 1, "ends"),
)

"""The error of a request for a solve with these changes; the next request must work."""
function failure(; more...)
    answer = ask("solve", arrays_of_one(); request(; more...)...)
    @test isempty(ask("solve", arrays_of_one(); request()...))
    @test Set(keys(answer)) == Set(["error", "kind"])
    return answer["kind"] * ": " * answer["error"]
end

@testset "SciMLBase's forms" begin
    context = (; sim_id = 3)
    problem, output = ProblemOf(i -> 10i), OutputOf((sol, i) -> sol + 10i)
    @test problem(nothing, context) == problem(nothing, 3, 1) == 30
    @test output(1, context) == output(1, 3) == (31, false)
end

@testset "errors" begin
    for (package, name, why) in (
        ("OrdinaryDiffEqNowhere", "Tsit5", "OrdinaryDiffEqNowhere is not in the project"),
        ("LinearAlgebra", "lu", "LinearAlgebra is not a package of OrdinaryDiffEq"),
        ("OrdinaryDiffEqTsit5", "Tsit6", "OrdinaryDiffEqTsit5 has no method Tsit6"),
        ("OrdinaryDiffEqTsit5", "OrdinaryDiffEqTsit5", "OrdinaryDiffEqTsit5 is not a method"),
    )
        @test occursin(why, failure(; method = Dict("name" => name, "package" => package)))
    end
    @test startswith(failure(; method = merge(named("Tsit5"), Dict("arguments" => [1, 2, 3]))),
                     "MethodError")
    @test occursin("backend must be one of",
                   failure(; place = Dict("name" => "EnsembleGPUKernel", "backend" => "Abacus")))
    @test startswith(failure(; place = Dict("name" => "EnsembleNowhere")), "KeyError")
    # The message names the installer's option that adds the missing package.
    missing_method = Dict("name" => "Tsit5", "package" => "OrdinaryDiffEqNowhere")
    @test occursin("install --all_methods`", failure(; method = missing_method))
    on_cuda = Dict("name" => "EnsembleGPUKernel", "backend" => "CUDA")
    Base.identify_package("CUDA") === nothing &&
        @test occursin("install --gpu=CUDA`", failure(; place = on_cuda))
    of_source(source) = failure(; field = described(; f = source))
    @test startswith(of_source("NAME(u, p, t) = 1 +* 2"), r"ParseError|ErrorException: syntax")
    @test startswith(of_source("NAME(u, p, t) = u .+ nowhere"), "UndefVarError")
    @test !isempty(of_source("NAME(u, p) = u"))
    @test ask("nothing")["kind"] == "KeyError"
    @test TOML.parse(EnsembleODE.handle("this is = not = TOML"))["kind"] == "ParserError"
    answer = ask("solve", Dict("u0" => [1.0]); request()...)
    @test answer["kind"] == "KeyError"
end

@testset "stopped by another task, $place" for place in ("EnsembleSerial", "EnsembleThreads")
    # The field yields to the timer's task, which stops the solve in place of a thread of Python.
    field = described(; f = "NAME(u, p, t) = (yield(); SVector{2, Float64}(u[2], -u[1]))")
    stop = Int32[0]
    timer = Timer(_ -> stop[1] = 1, 1)
    took = @elapsed out = solved(
        field, 8; u0 = [1.0, 0.0], t1 = 1e9, maxiters = 10^9, start = true, place, stop
    )
    close(timer)
    @test stop[1] == 1 && took < 60
    @test all(!=(SUCCESS), out.codes) && all(==(1), out.lengths)
    # The number is the request's own: the next request is not stopped.
    @test solved(field, 1; u0 = [1.0, 0.0], place).codes == [SUCCESS]
end

@testset "arguments and options of methods" begin
    switching = Dict(
        "name" => "AutoTsit5", "package" => "OrdinaryDiffEqTsit5",
        "arguments" => [merge(named("Rosenbrock23"), Dict("options" => Dict()))],
        "options" => Dict("maxstiffstep" => 7),
    )
    method = EnsembleODE.method(switching)
    @test nameof.(typeof.(method.algs)) == (:Tsit5, :Rosenbrock23)
    @test method.choice_function.maxstiffstep == 7
    @test EnsembleODE.argument(Any[1, -0.5, true]) === (1, -0.5, true)
    @test EnsembleODE.argument(Dict("val" => 3)) === Val(3)
    @test EnsembleODE.argument(Dict("val" => false)) === Val(false)
end

@testset "status" begin
    status = ask("status")
    @test status["version"] == string(VERSION) && status["threads"] == Threads.nthreads()
    @test status["project"] == Base.active_project() && status["worker_pids"] == []
    @test VersionNumber(status["scimlbase"]) == pkgversion(SciMLBase)
end

@testset "a process of its own" begin
    # As Python runs it: requests and answers go through pipes, arrays lie in a file that both map.
    options = addenv(
        `$(Base.julia_cmd()) --startup-file=no --threads=1 --project=$(Base.active_project())`,
        "JULIA_LOAD_PATH" => join(LOAD_PATH, Sys.iswindows() ? ';' : ':'),
    )
    code = "using EnsembleODE: EnsembleODE; EnsembleODE.serve()"
    process = open(pipeline(`$options -e $code`; stderr = devnull), "r+")
    @test readline(process) == "ready"
    function answered(text)
        print(process, ncodeunits(text), "\n", text)
        flush(process)
        return TOML.parse(String(read(process, parse(Int, readline(process)))))
    end

    arrays = arrays_of_one()
    path = tempname()
    ends = cumsum(64 * cld(sizeof(x), 64) for x in values(arrays))
    starts = Dict(zip(keys(arrays), [0; ends]))
    open(io -> write(io, zeros(UInt8, last(ends))), path, "w")
    memory = open(io -> Mmap.mmap(io, Vector{UInt8}), path, "r+")
    there(name) = unsafe_wrap(
        Array, Ptr{eltype(arrays[name])}(pointer(memory) + starts[name]), size(arrays[name])
    )
    offsets = IdDict(x => starts[name] for (name, x) in arrays)
    placed(x) = Dict("offset" => offsets[x])
    GC.@preserve memory begin
        foreach(name -> copyto!(there(name), arrays[name]), keys(arrays))
        # What a right-hand side prints does not come between the answers.
        loud = described(; f = replace(LINEAR, "k = " => "t == 0 && println(\"loud\"); k = "))
        for field in (linear(), loud)
            there("u") .= 0
            solve = text("solve", arrays; placed, memory = path, request(; field)...)
            @test answered(solve) == Dict()
            @test there("codes") == [SUCCESS]
            @test there("u")[:, 1, 1] ≈ exact(1.0, [1.0, 2.0], 0.0, 1.0)
        end
        @test answered("operation = \"täglich\"")["kind"] == "KeyError"
        @test answered(text("status"))["threads"] == 1
    end
    close(process.in)
    @test eof(process)
    wait(process)
    @test success(process)
    rm(path)
end
