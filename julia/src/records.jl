# The return codes, with Python's numbers.
const SUCCESS, MAX_ITERS, DT_LESS_THAN_MIN, UNSTABLE, FAILURE = Int32.(1:5)
const TERMINATED, MAX_EVENTS, NOT_CONVERGED, INITIAL_FAILURE = Int32.(6:9)

# What an affect says of its trajectory (Python's `AffectOutcome`); 2 is "did not converge".
const GOES_ON, TERMINATES = 0, 1

function code(retcode)
    retcode == ReturnCode.Success && return SUCCESS
    retcode == ReturnCode.Terminated && return TERMINATED
    retcode == ReturnCode.MaxIters && return MAX_ITERS
    retcode == ReturnCode.DtLessThanMin && return DT_LESS_THAN_MIN
    retcode in (ReturnCode.Unstable, ReturnCode.DtNaN) && return UNSTABLE
    return FAILURE
end

"""The code of the affect or of the inconsistent start that ended the trajectory, else SciML's."""
code(retcode, ::Nothing) = code(retcode)
code(retcode, happened::Happened) =
    retcode == ReturnCode.Terminated || happened.code == INITIAL_FAILURE ? happened.code :
    code(retcode)

"""
    Outputs(; mode, start, u, t, lengths, codes, counts, events)

The arrays to which solutions are written: `u [state, time, trajectory]`, and `t [time, trajectory]`
where every step is saved. Times that were not reached are NaN, and so are their states; the number
of times that were reached is in `lengths [trajectory]`.

- `mode`: `:ends`, `:times` or `:steps`; `start`: whether the start is saved.
- `counts`: the arrays `[trajectory]` of the counts that are kept, by their names in `COUNTS`.
- `events`: the arrays of `RecordedEvents`, with the trajectory as the last axis; or `nothing`.
"""
Base.@kwdef struct Outputs{T,Times,Counts,Events}
    mode::Symbol
    start::Bool
    u::Array{T,3}
    t::Times
    lengths::Vector{Int32}
    codes::Vector{Int32}
    counts::Counts
    events::Events = nothing
end

"""What is kept of one solution: sent back by a worker process, which can't write to `Outputs`."""
struct Record{T,Counts,H}
    u::Matrix{T}
    t::Vector{T}
    length::Int32
    code::Int32
    counts::Counts
    happened::H
end

"""Write what is kept of the solution of trajectory `i`."""
function write!(out::Outputs, ens::Trajectories, sol, i)
    t = out.t === nothing ? nothing : view(out.t, :, i)
    u = view(out.u, :, :, i)
    out.lengths[i], out.codes[i] = keep!(u, t, out.mode, out.start, ens, sol, i)
    write!(out.counts, counts(sol), i)
    write!(out.events, sol.prob.p.happened, i)
    return nothing
end

function write!(out::Outputs, record::Record, i)
    out.u[:, :, i] = record.u
    out.t === nothing || (out.t[:, i] = record.t)
    out.lengths[i], out.codes[i] = record.length, record.code
    write!(out.counts, record.counts, i)
    write!(out.events, record.happened, i)
    return nothing
end

write!(kept::NamedTuple, counts::NamedTuple, i) =
    foreach(name -> kept[name][i] = counts[name], keys(kept))

write!(::Nothing, happened, i) = nothing
function write!(events::NamedTuple, happened::Happened, i)
    for name in (:t, :which)
        events[name][:, i] = getproperty(happened, name)
    end
    for name in (:crossed, :before, :after)
        events[name][:, :, i] = getproperty(happened, name)
    end
    events.count[i] = happened.count
    return nothing
end

function Record(mode, first, rows, ens::Trajectories{T}, sol, i) where {T}
    u = Matrix{T}(undef, size(ens.u0, 1), rows)
    t = Vector{T}(undef, mode === :steps ? rows : 0)
    length, code = keep!(u, mode === :steps ? t : nothing, mode, first, ens, sol, i)
    return Record(u, t, length, code, counts(sol), sol.prob.p.happened)
end

# The counts, with the names of their fields in SciML's statistics. A count that is too large for
# the arrays is the largest number of their type.
const COUNTS = (;
    naccept = :naccept, nreject = :nreject, nf = :nf, njac = :njacs, nw = :nw, nsolve = :nsolve
)

function counts(sol)
    of(name) = sol.stats === nothing ? 0 : getproperty(sol.stats, name)
    return map(name -> Int32(min(of(name), typemax(Int32))), COUNTS)
end

"""Write the saved states to the rows; return the number of rows reached, and the return code."""
function keep!(u, t, mode, first, ens, sol, i)
    fill!(u, NaN)
    t === nothing || fill!(t, NaN)
    ended = code(sol.retcode, sol.prob.p.happened)
    row, finite = 0, true
    if mode === :times
        times = column(ens.times, i)
        last = ens.counts === nothing ? length(times) : entry(ens.counts, i)
        from = 1
        for k in 1:last
            # A failed solution ends at a time that was not asked for.
            while from <= length(sol.t) && sol.t[from] != times[k]
                from += 1
            end
            from > length(sol.t) && break
            row += 1
            finite &= put!(u, row, sol.u[from])
        end
        row < last && ended == SUCCESS && (ended = FAILURE)
    elseif mode === :ends
        if first
            row += 1
            finite &= put!(u, row, sol.u[1])
        end
        if ended in (SUCCESS, TERMINATED)
            row += 1
            finite &= put!(u, row, sol.u[end])
        end
    else
        for k in eachindex(sol.t)
            row == size(u, 2) && break
            row += 1
            t[row] = sol.t[k]
            finite &= put!(u, row, sol.u[k])
        end
    end
    finite && return Int32(row), ended
    # Cut the solution off at its first state that is not finite.
    whole = findfirst(k -> !all(isfinite, view(u, :, k)), 1:row) - 1
    u[:, (whole+1):end] .= NaN
    t === nothing || (t[(whole+1):end] .= NaN)
    return Int32(whole), ended in (SUCCESS, TERMINATED) ? UNSTABLE : ended
end

function put!(u, row, x)
    finite = true
    for (k, value) in enumerate(x)
        u[k, row] = value
        finite &= isfinite(value)
    end
    return finite
end
