function f_103b66c9132d64fa(out, u, p, t)
    (work1,) = p.work.f
    @inbounds begin
        for i1 in 0:19
            @simd for i2 in 0:19
                work1[20 * i1 + i2 + 1] = Float64((i1 == i2))
            end
        end
        for i3 in 0:19
            @simd for i4 in 0:19
                work1[20 * i3 + i4 + 401] = Primitives.cos((u[i4 + 1] - u[i3 + 1]))
            end
        end
        for i5 in 0:19
            for i6 in 0:19
                x1 = 0.0
                @simd for i7 in 0:19
                    x1 = x1 + ((work1[20 * i5 + i7 + 1] - work1[20 * i5 + i6 + 1]) * work1[20 * i6 + i7 + 401])
                end
                work1[20 * i5 + i6 + 801] = x1
            end
        end
        for i8 in 0:19
            @simd for i9 in 0:19
                work1[20 * i8 + i9 + 1201] = p.shared[1] * (work1[i8 + 20 * i9 + 801] / 20.0)
            end
        end
        for i10 in 0:19
            @simd for i11 in 0:19
                out[20 * i10 + i11 + 1] = work1[i10 + 20 * i11 + 1201]
            end
        end
    end
    return nothing
end
