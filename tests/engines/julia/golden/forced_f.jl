function f_59391450b3d62937(u, p, t)
    x1 = p.own[2] * t
    x2 = Primitives.cos(x1)
    x3 = p.own[1] * x2
    x4 = p.own[3] * u[2]
    x5 = x3 - x4
    x6 = x5 - u[1]
    x7 = u[1] * u[1]
    x8 = u[1] * x7
    x9 = x6 - x8
    return SVector{2, Float64}(u[2], x9)
end
