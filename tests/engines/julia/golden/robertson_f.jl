function f_47826e60caa236a9(u, p, t)
    x1 = p.own[2] * u[2]
    x2 = x1 * u[3]
    x3 = p.own[1] * u[1]
    x4 = x2 - x3
    x5 = p.own[1] * u[1]
    x6 = p.own[2] * u[2]
    x7 = x6 * u[3]
    x8 = x5 - x7
    x9 = u[2] * u[2]
    x10 = p.own[3] * x9
    x11 = x8 - x10
    x12 = u[2] * u[2]
    x13 = p.own[3] * x12
    return SVector{3, Float64}(x4, x11, x13)
end
