function f_8f8ce88390a0d826(out, u, p, t)
    (work1,) = p.work.f
    @inbounds begin
        @simd for i1 in 0:323
            work1[i1 + 1] = 0.0
        end
        for i2 in 0:15
            @simd for i3 in 0:15
                work1[18 * i2 + i3 + 20] = u[16 * i2 + i3 + 1]
            end
        end
        for i4 in 0:15
            @simd for i5 in 0:15
                out[16 * i4 + i5 + 1] = p.own[1] * ((((work1[18 * i4 + i5 + 38] + work1[18 * i4 + i5 + 2]) + work1[18 * i4 + i5 + 21]) + work1[18 * i4 + i5 + 19]) - (4.0 * u[16 * i4 + i5 + 1]))
            end
        end
    end
    return nothing
end
