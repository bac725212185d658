function f_cca408fe451f2a06(out, u, p, t)
    (work1,) = p.work.f
    @inbounds begin
        for i1 in 0:19
            x1 = 0.0
            @simd for i2 in 0:19
                x1 = x1 + Primitives.sin((u[i2 + 1] - u[i1 + 1]))
            end
            work1[i1 + 1] = x1
        end
        @simd for i3 in 0:19
            out[i3 + 1] = p.own[i3 + 1] + (p.shared[1] * (work1[i3 + 1] / 20.0))
        end
    end
    return nothing
end
