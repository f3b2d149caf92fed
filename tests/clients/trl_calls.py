"""The functions of this package that compute TRL's fused losses; `trl_client.py` counts their calls."""

from apex._fuse import head
from apex.contrib.llm_losses import heads
from apex.integrations import trl

# Each by the module that calls it, and by its name there.
PLACES = [
    (trl, "linear_log_probs"),
    (trl, "linear_cross_entropy"),
    (head, "linear_cross_entropy"),
    (heads, "linear_log_probs"),
    (heads, "linear_token_loss"),
]
