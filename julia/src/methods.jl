# Python describes a method by data, never by code: the method's name, package and arguments.

"""
    method(description)

The method of `Dict("name" => "KenCarp4", "package" => "OrdinaryDiffEqSDIRK", "arguments" => [],
"options" => Dict())`. Arguments and the values of options are numbers, vectors of numbers for
tuples, methods, names of stochastic integrals, or `Dict("val" => 3)` for `Val(3)`.
"""
function method(description::AbstractDict)
    name, package = description["name"], description["package"]
    any(x -> startswith(package, x), ("OrdinaryDiffEq", "StochasticDiffEq")) ||
        error("$package is not a package of OrdinaryDiffEq or StochasticDiffEq.")
    arguments = map(argument, get(description, "arguments", []))
    options = [Symbol(k) => argument(v) for (k, v) in get(description, "options", Dict())]
    # The package may have been loaded just now, and is then of a newer world age than this call.
    return Base.invokelatest(make, load(package), Symbol(name), arguments, options)
end

function make(package::Module, name::Symbol, arguments, options)
    isdefined(package, name) || error("$package has no method $name.")
    found = getproperty(package, name)
    found isa Type || found isa Function || error("$name is not a method.")
    return found(arguments...; options...)
end

argument(x::AbstractDict) = haskey(x, "val") ? Val(x["val"]) : method(x)
argument(x::AbstractVector) = Tuple(map(argument, x))
argument(x::Real) = x
argument(x::AbstractString) = INTERPRETATIONS[x]

const INTERPRETATIONS = Dict(
    "Ito" => SciMLBase.AlgorithmInterpretation.Ito,
    "Stratonovich" => SciMLBase.AlgorithmInterpretation.Stratonovich,
)

"""The package, loaded on first use. `option`: the installer's option that adds the package."""
function load(package::AbstractString, option = "--all_methods")
    for parent in (@__MODULE__, nothing)
        id = parent === nothing ? Base.identify_package(package) :
             Base.identify_package(parent, package)
        id === nothing && continue
        # Workers that started after the package was loaded here don't have it yet.
        processes = IN_USE[]
        isempty(processes) || Distributed.remotecall_eval(Main, processes, :(Base.require($id)))
        return Base.require(id)
    end
    return error(
        "the Julia package $package is not in the project $(Base.active_project()). Install it " *
        "with `ensembleode julia install $option`, or add it there.",
    )
end
