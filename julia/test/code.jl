# Checks of the code itself.
const MODULES = (EnsembleODE, EnsembleODE.Primitives, EnsembleODE.Fields)

@testset "hygiene" begin
    @test isempty(detect_ambiguities(EnsembleODE; recursive = true))
    @test isempty(detect_unbound_args(EnsembleODE; recursive = true))
    for m in MODULES
        @test all(name -> isdefined(m, name), names(m))
    end
    extension = Base.get_extension(EnsembleODE, :EnsembleODEGPUExt)
    extension === nothing || @test isempty(detect_ambiguities(EnsembleODE, extension))
    # The project names every package that the code loads.
    project = TOML.parsefile(joinpath(pkgdir(EnsembleODE), "Project.toml"))
    named = union(keys(project["deps"]), keys(project["weakdeps"]))
    for folder in ("src", "ext")
        folder = joinpath(pkgdir(EnsembleODE), "julia", folder)
        code = join(read(file, String) for file in readdir(folder; join = true))
        for m in eachmatch(r"^ *using (\w+)"m, code)
            @test m[1] == "EnsembleODE" || m[1] in named
        end
    end
    @test issubset(named, keys(project["compat"]))
end
