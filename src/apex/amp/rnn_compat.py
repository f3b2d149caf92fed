"""An upstream function that scripts import, mostly unused; editors offer it for completion."""


def has_old_rnns() -> bool:
    """Return False: recurrent layers are not from PyTorch 0.4."""
    return False
