function f_8fec8efe3114c816(u, p, t)
    x1 = -p.own[1]
    x2 = x1 / p.shared[1]
    x3 = Primitives.sin(u[1])
    x4 = x2 * x3
    return SVector{2, Float64}(u[2], x4)
end
