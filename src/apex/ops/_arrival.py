"""Programs of one launch that finish each other's work, none of them waiting: the last to arrive does the rest.

What a second launch would do costs the host nothing this way, 8 us of it on a slow one. Who is last depends on the run,
what it adds up and in which order does not: results are deterministic. Only for devices that `publishes_for_all`.
"""

import triton
import triton.language as tl


@triton.jit
def arrives_last(ticket, members):
    """Whether this program is the last of `members` to ask; then it sees all that the others stored before they did.

    `ticket` points to an int32 that is 0 before the first asks, and again after the last. What others stored must be
    loaded with `cache_modifier=".cg"`, past the multiprocessor's own cache.
    """
    tl.debug_barrier()  # all threads of this program have stored what they had to
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == members - 1
    if last:
        tl.store(ticket, 0)
    return last
