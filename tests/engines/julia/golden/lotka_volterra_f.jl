function f_c5f900ac90535066(u, p, t)
    x1 = p.own[1] * u[1]
    x2 = p.own[2] * u[1]
    x3 = x2 * u[2]
    x4 = x1 - x3
    x5 = -p.own[3]
    x6 = x5 * u[2]
    x7 = p.own[4] * u[1]
    x8 = x7 * u[2]
    x9 = x6 + x8
    return SVector{2, Float64}(x4, x9)
end
