"""Comparing what the stand-in says with what vLLM said."""


def shape(value: object, place: str = "") -> dict[str, type]:
    """The type of every value by its place; None fits nothing else."""
    if isinstance(value, dict):
        return {key: kind for name, inner in value.items() for key, kind in shape(inner, f"{place}.{name}").items()}
    if isinstance(value, list):
        return {key: kind for inner in value for key, kind in shape(inner, f"{place}[]").items()}
    return {place: type(value)}
