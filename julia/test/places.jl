# Trajectories are the same to the last bit wherever they run.

const PROCESSES = (; place = "EnsembleDistributed", workers = 2, threads = 1)
const PLACES = ((; place = "EnsembleThreads"), PROCESSES)
const SAVED = (; mode = "times", times = [0.0, 0.3, 1.0], NUMBERS...)

const BOTH = (("out of place", linear()), ("in place", linear_in_place()))

@testset "solutions, $how" for (how, field) in BOTH
    serial = solved(field, N; SAVED...)
    @test right(serial, i -> SAVED.times)
    for place in PLACES
        @test isequal(solved(field, N; SAVED..., place...), serial)
    end
end

@testset "every step" begin
    options = (; mode = "steps", start = true, rows = 60, NUMBERS...)
    every(; place...) = solved(linear(), N; options..., place...)
    serial = every()
    @test all(place -> isequal(every(; place...), serial), PLACES)
end

@testset "gradients" begin
    rows = [0.0, 0.5, 1.0]
    c = cotangents_of(rows)
    _, field, adjoint = first(ADJOINTS)
    serial = gradients(field, adjoint, rows, c)
    @test serial ≈ by_closed_form(rows, c) rtol = 1e-6
    @test all(place -> gradients(field, adjoint, rows, c; place...) == serial, PLACES)
end

@testset "failures" begin
    own = copy(OWN)
    own[2] = NaN
    serial = solved(linear(), N; SAVED..., own)
    @test serial.codes == [SUCCESS, UNSTABLE, SUCCESS, SUCCESS, SUCCESS]
    @test all(place -> isequal(solved(linear(), N; SAVED..., own, place...), serial), PLACES)
    # An exception of f arrives without the exceptions that threads and processes wrap around it.
    throwing = described(; f = "NAME(u, p, t) = throw(ArgumentError(\"inside of f \\\"\\n\"))")
    for place in ((; place = "EnsembleSerial"), PLACES...), n in (1, N)
        @test_throws ErrorException("ArgumentError: ArgumentError: inside of f \"\n") solved(
            throwing, n; place..., NUMBERS..., own = OWN[:, 1:n], u0 = NUMBERS.u0[:, 1:n]
        )
    end
    @test right(solved(linear(), N; SAVED..., PROCESSES...), i -> SAVED.times)
end

@testset "processes" begin
    two(name, threads) = ask(
        "workers"; place = Dict("name" => name, "workers" => 2, "threads" => threads)
    )
    # The processes stay while requests ask for as many, with as many threads.
    status = two("EnsembleDistributed", 1)
    @test status["workers"] == 2 && length(unique(status["worker_pids"])) == 2
    @test two("EnsembleSplitThreads", 1)["worker_pids"] == status["worker_pids"]
    @test !(getpid() in status["worker_pids"])
    # Another number of threads takes new processes, to which the functions are sent again.
    serial = solved(linear(), N; SAVED...)
    place = (; place = "EnsembleSplitThreads", workers = 2, threads = 2)
    @test isequal(solved(linear(), N; SAVED..., place...), serial)
    one = (; own = OWN[:, 1:1], u0 = NUMBERS.u0[:, 1:1])
    @test solved(linear(), 1; SAVED..., place..., one...).u == serial.u[:, :, 1:1]
    others = two("EnsembleSplitThreads", 2)
    @test isempty(intersect(others["worker_pids"], status["worker_pids"]))
    # A process that died does not matter to a serial solve; the next request for workers gets
    # new processes.
    run(`kill -9 $(first(others["worker_pids"]))`)
    @test isequal(solved(linear(), N; SAVED...), serial)
    @test ask("status")["workers"] == 1
    @test isempty(intersect(two("EnsembleSplitThreads", 2)["worker_pids"], others["worker_pids"]))
    ask("stop_workers")
    @test ask("status")["workers"] == 0 && Distributed.nprocs() == 1
end
