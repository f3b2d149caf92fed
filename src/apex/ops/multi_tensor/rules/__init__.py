"""Every update rule, written once, in a file per family.

A rule's function is pure arithmetic on one element of each list. It runs unchanged on PyTorch's tensors, with
`rule.tl`, and is compiled for a GPU with `triton.language` as `tl` (`kernels.py`). So it may use operators, `tl.`
functions that both have, its helpers, and `if` on FLAGS, and nothing else. The `*_scalars` functions take differences
like 1 - beta in double precision; their arguments are numbers or float64 tensors of one number. In float32, 1 - 0.999
is off by 5e-5.
"""

from .adadelta import ADADELTA
from .adagrad import ADAGRAD
from .adam import ADAM, ADAM_AMSGRAD, ADAM_AMSGRAD_LISTS, ADAM_AVERAGE, ADAM_LISTS, GUARDED_ADAM, corrections
from .adam_like import ADEMAMIX, NADAM, RADAM, SCHEDULE_FREE
from .adamp import ADAMP, ADAMP_MEASURE, ADAMP_NESTEROV
from .elementary import AXPBY, MASK, MAXIMUM, SCALE, SCALE_AFTER_SQUARE_SUM, SCALE_EACH, SCALE_SQUARE_SUM, SQUARE_SUM
from .lamb import LAMB_MOMENTS, LAMB_STEP, LAMB_UNSCALED
from .lars import LARS, LARS_NORMS, PLAIN_LARS
from .legacy import ADAM_UNDO, ADAM_UNSCALING, EARLY_ADAM, LAMB_UPDATE, LAMB_WEIGHTS, LARC, REVERSIBLE_ADAM
from .muon import LION, MUON_MOMENTUM, MUON_UPDATE
from .novograd import NOVOGRAD
from .rmsprop import RMSPROP, RMSPROP_ALL, RMSPROP_MORE
from .sgd import PLAIN_SGD, SGD, sgd_flags
