function f_12179ce41def3757(u, p, t)
    forward = p.forward(t)
    x1 = p.own[2] * forward[1]
    x2 = -p.own[3]
    x3 = p.own[4] * forward[1]
    x4 = x3 * u[2]
    x5 = u[2] * forward[2]
    x6 = p.own[4] * x5
    x7 = x5 * forward[1]
    x8 = x2 * u[2]
    x9 = u[2] * forward[2]
    x10 = x4 + x8
    x11 = -x9
    x12 = -u[1]
    x13 = x1 * x12
    x14 = x12 * forward[2]
    x15 = x10 + x13
    x16 = p.own[2] * x14
    x17 = x14 * forward[1]
    x18 = x6 + x16
    x19 = p.own[1] * u[1]
    x20 = u[1] * forward[1]
    x21 = x18 + x19
    return SVector{6, Float64}(x21, x15, x20, x17, x11, x7)
end
