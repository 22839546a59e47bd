"""Generated mutants that change nothing, each with the reason."""

# A function and a change of it, as the score prints them: why nothing else comes of it.
SAME: dict[tuple[str, str], str] = {
    (
        "towerjax.mesh.transfer:place_own",
        "constant: 1 -> 2",
    ): "what several processes do places the same arrays on one",
    (
        "towerjax.step.members:Members.begin",
        "constant: 0 -> 1",
    ): "all members begin at one number",
    (
        "towerjax.tools.sweep.train:Sweep.best",
        "constant: 0 -> 1",
    ): "a dict of which the keys alone are read, in their order",
    (
        "towerjax.types.leaves:widen_dtype",
        "flipped: jnp.dtype(dtype).itemsize < 4 -> jnp.dtype(dtype).itemsize <= 4",
    ): "float32 is widened to float32",
    (
        "towerjax.loop.history:History.plot",
        "constant: 3.2 -> 7.4",
    ): "inches of a picture",
    (
        "towerjax.step.compile:_named",
        "deleted: run.__signature__ = inspect.Signature(parameters) -> pass",
    ): "names of a program's parameters, for who reads its text",
}
