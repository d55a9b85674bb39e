"""How large the pictures of a request may be."""

from vllm_qualify.recipe.values import CountOrZero, Frozen


class PictureLimits(Frozen):
    """The most pixels of a picture, and of all pictures of a request together; None without a limit of the server."""

    most_pixels: CountOrZero | None = None
    most_pixels_together: CountOrZero | None = None


NO_LIMITS = PictureLimits()
