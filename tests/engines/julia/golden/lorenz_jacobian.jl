function f_32ad265b49829679(u, p, t)
    x1 = -1.0
    x2 = p.own[1] * x1
    x3 = p.own[2] - u[3]
    x4 = u[1] * (-1.0)
    x5 = -1.0
    x6 = -p.own[3]
    return SVector{9, Float64}(x2, x3, u[2], p.own[1], x5, u[1], 0.0, x4, x6)
end
