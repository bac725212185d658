"""SciML's noise processes."""
module EnsembleODENoiseExt

using DiffEqNoiseProcess: NoiseProcess, WienerProcess
using EnsembleODE: EnsembleODE

# A step that is cut short follows the line on which its path is.
along_line(dW, W, W0, Wh, q, h, u, p, t, rng) = q * Wh
along_line!(dW, W, W0, Wh, q, h, u, p, t, rng) = (dW .= q .* Wh)

function EnsembleODE.noise_process(::Val{in_place}, t0, W0, Z0, increments) where {in_place}
    bridge = in_place ? along_line! : along_line
    return NoiseProcess{in_place}(
        t0, W0, Z0, increments, bridge; save_everystep = false, reseed = false
    )
end

EnsembleODE.wiener_process(t0, W0, Z0) = WienerProcess(t0, W0, Z0; save_everystep = false)

end
