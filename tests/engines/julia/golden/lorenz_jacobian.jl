function f_7ac7c6dd5c1e51ab(u, p, t)
    x1 = p.own[1] * (-1.0)
    x2 = p.own[2] - u[3]
    x3 = u[1] * (-1.0)
    x4 = -p.own[3]
    return SVector{9, Float64}(x1, x2, u[2], p.own[1], (-1.0), u[1], 0.0, x3, x4)
end
