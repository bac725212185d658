function f_098ece3c74f17d34(u, p, t)
    x1 = u[2] - u[1]
    x2 = p.own[1] * x1
    x3 = p.own[2] - u[3]
    x4 = u[1] * x3
    x5 = x4 - u[2]
    x6 = u[1] * u[2]
    x7 = p.own[3] * u[3]
    x8 = x6 - x7
    return SVector{3, Float64}(x2, x5, x8)
end
