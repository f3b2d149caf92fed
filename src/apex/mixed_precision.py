"""The mixed precisions of `apex.booster`, under the name that scripts import them by."""

from .booster.mixed_precision import *  # noqa: F403
from .booster.mixed_precision import __all__ as __all__
