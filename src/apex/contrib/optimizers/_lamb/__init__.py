"""What DistributedFusedLAMB has beside the engine of `_zero`.

communicators  process groups: machines repeat the state that the processes of one machine divide
reducer        from gradients, which stay with their parameters, to means over all processes, and their norm
shards         the layout of parameters, and what is sent of their masters
update         LAMB of the shards of this process, with norms of whole parameters
state          state dicts
lists          tensors that rules walk over
"""
