"""A function of upstream's that scripts import, mostly unused; editors offer it for completion."""


def has_old_rnns() -> bool:
    """Whether recurrent layers are those of PyTorch 0.4: no."""
    return False
