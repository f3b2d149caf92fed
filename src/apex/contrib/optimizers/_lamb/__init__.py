"""What DistributedFusedLAMB has beside the engine of `_zero`.

reducer   from gradients, which stay with their parameters, to means over all processes, and their norm
shards    the layout of parameters, masters and moments, the update with norms of whole parameters, state dicts
"""
