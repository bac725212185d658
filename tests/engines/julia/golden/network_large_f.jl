function f_46c9ccfac890552c(out, u, p, t)
    (work1,) = p.work.f
    @inbounds begin
        mul!(view(work1, 1:200), transpose(reshape(view(p.own, 1:1600), 8, 200)), view(u, 1:8))
        @simd for i1 in 0:199
            work1[i1 + 201] = Primitives.tanh((work1[i1 + 1] + p.shared[i1 + 1]))
        end
        mul!(view(work1, 401:408), transpose(reshape(view(p.own, 1601:3200), 200, 8)), view(work1, 201:400))
        @simd for i2 in 0:7
            out[i2 + 1] = work1[i2 + 401] + p.shared[i2 + 201]
        end
    end
    return nothing
end
