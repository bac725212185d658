# The return codes, by the numbers that Python knows them by.
const SUCCESS, MAX_ITERS, DT_LESS_THAN_MIN, UNSTABLE, FAILURE = Int32.(1:5)

function code(retcode)
    retcode == ReturnCode.Success && return SUCCESS
    retcode == ReturnCode.Terminated && return SUCCESS
    retcode == ReturnCode.MaxIters && return MAX_ITERS
    retcode == ReturnCode.DtLessThanMin && return DT_LESS_THAN_MIN
    retcode in (ReturnCode.Unstable, ReturnCode.DtNaN) && return UNSTABLE
    return FAILURE
end

"""
    Outputs(; mode, start, u, t, lengths, codes, naccept, nreject, nf)

Where the solutions go: `u [state, time, trajectory]`, and `t [time, trajectory]` where every step
is saved. What was not reached is NaN; `lengths` says how many times were.

- `mode`: `:ends`, `:times` or `:steps`; `start`: whether the start is saved.
"""
Base.@kwdef struct Outputs{T,Times}
    mode::Symbol
    start::Bool
    u::Array{T,3}
    t::Times
    lengths::Vector{Int32}
    codes::Vector{Int32}
    naccept::Vector{Int32}
    nreject::Vector{Int32}
    nf::Vector{Int32}
end

"""What is kept of one solution, where it can't be written at once: in another process."""
struct Record{T}
    u::Matrix{T}
    t::Vector{T}
    length::Int32
    code::Int32
    counts::NTuple{3,Int32}
end

"""Write what is kept of the solution of trajectory `i`."""
function write!(out::Outputs, ens::Trajectories, sol, i)
    t = out.t === nothing ? nothing : view(out.t, :, i)
    u = view(out.u, :, :, i)
    out.lengths[i], out.codes[i] = keep!(u, t, out.mode, out.start, ens, sol, i)
    out.naccept[i], out.nreject[i], out.nf[i] = counts(sol)
    return nothing
end

function write!(out::Outputs, record::Record, i)
    out.u[:, :, i] = record.u
    out.t === nothing || (out.t[:, i] = record.t)
    out.lengths[i], out.codes[i] = record.length, record.code
    out.naccept[i], out.nreject[i], out.nf[i] = record.counts
    return nothing
end

function Record(mode, first, rows, ens::Trajectories{T}, sol, i) where {T}
    u = Matrix{T}(undef, size(ens.u0, 1), rows)
    t = Vector{T}(undef, mode === :steps ? rows : 0)
    length, code = keep!(u, mode === :steps ? t : nothing, mode, first, ens, sol, i)
    return Record(u, t, length, code, counts(sol))
end

function counts(sol)
    stats = sol.stats
    stats === nothing && return (Int32(0), Int32(0), Int32(0))
    return (Int32(stats.naccept), Int32(stats.nreject), Int32(stats.nf))
end

"""Fill the rows with the saved states. Returns how many were reached, and the return code."""
function keep!(u, t, mode, first, ens, sol, i)
    fill!(u, NaN)
    t === nothing || fill!(t, NaN)
    ended = code(sol.retcode)
    row, finite = 0, true
    if mode === :times
        times = column(ens.times, i)
        last = ens.counts === nothing ? length(times) : entry(ens.counts, i)
        from = 1
        for k in 1:last
            # A failed solution ends with a time that was not asked for.
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
        if ended == SUCCESS
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
    # Cut off where it is not finite.
    whole = findfirst(k -> !all(isfinite, view(u, :, k)), 1:row) - 1
    u[:, (whole+1):end] .= NaN
    t === nothing || (t[(whole+1):end] .= NaN)
    return Int32(whole), ended == SUCCESS ? UNSTABLE : ended
end

function put!(u, row, x)
    finite = true
    for (k, value) in enumerate(x)
        u[k, row] = value
        finite &= isfinite(value)
    end
    return finite
end
