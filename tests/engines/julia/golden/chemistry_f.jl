function f_efcad04ed17a6875(u, p, t)
    x1 = Primitives.max(0.0, u[2])
    x2 = Primitives.max(0.0, u[3])
    x3 = Primitives.max(0.0, u[4])
    x4 = Primitives.min(1.0, x1)
    x5 = Primitives.min(1.0, x2)
    x6 = Primitives.min(1.0, x3)
    x7 = -p.shared[1]
    x8 = u[1] > 0.1
    x9 = ifelse(x8, u[1], 0.1)
    x10 = x7 / x9
    x11 = Primitives.exp(x10)
    x12 = p.own[1] * x11
    x13 = p.own[2] * x11
    x14 = p.own[3] * x11
    x15 = x12 * x4
    x16 = x13 * x5
    x17 = x14 * x6
    x18 = p.own[4] * x15
    x19 = p.own[5] * x16
    x20 = p.own[6] * x17
    x21 = x18 + x19
    x22 = x21 + x20
    x23 = x22 - u[1]
    x24 = -x15
    x25 = -x16
    x26 = -x17
    return SVector{4, Float64}(x23, x24, x25, x26)
end
