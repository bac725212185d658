function f_7aef54e2b9f153db(out, u, p, t)
    forward = p.forward(t)
    (work1,) = p.work.f
    @inbounds begin
        for i1 in 0:19
            @simd for i2 in 0:19
                work1[20 * i1 + i2 + 1] = forward[i2 + 1] - forward[i1 + 1]
            end
        end
        for i3 in 0:19
            x1 = 0.0
            @simd for i4 in 0:19
                x1 = x1 + Primitives.sin(work1[20 * i3 + i4 + 1])
            end
            work1[i3 + 401] = x1
        end
        x2 = 0.0
        @simd for i5 in 0:19
            x2 = x2 + (u[i5 + 1] * (work1[i5 + 401] / 20.0))
        end
        @simd for i6 in 0:19
            work1[i6 + 421] = (p.shared[1] * u[i6 + 1]) / 20.0
        end
        for i7 in 0:19
            @simd for i8 in 0:19
                work1[20 * i7 + i8 + 441] = work1[i7 + 421] * Primitives.cos(work1[20 * i7 + i8 + 1])
            end
        end
        for i9 in 0:19
            x3 = 0.0
            @simd for i10 in 0:19
                x3 = x3 + work1[20 * i10 + i9 + 441]
            end
            work1[i9 + 841] = x3
        end
        for i11 in 0:19
            x4 = 0.0
            @simd for i12 in 0:19
                x4 = x4 + (-work1[20 * i11 + i12 + 441])
            end
            work1[i11 + 861] = x4
        end
        @simd for i13 in 0:19
            work1[i13 + 881] = work1[i13 + 861] + work1[i13 + 841]
        end
        @simd for i14 in 0:19
            work1[i14 + 901] = u[i14 + 1]
        end
        work1[921] = x2
        @simd for i15 in 0:40
            out[i15 + 1] = work1[i15 + 881]
        end
    end
    return nothing
end
