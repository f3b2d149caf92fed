"""Building blocks of everything that runs in several processes.

collectives  asynchronous all-reduce, reduce-scatter, all-gather and all-to-all on any backend
exchange     sums, gathers and splits of tensors for layers that ranks share
norms        the norm of gradients that may be sharded
shards       parts of DTensors, and sums over all parts
reducer      gradient buckets: detection of complete buckets, and a common order of sending
groups       process groups and meshes with the default group's timeout
comparison   checks that all processes have the same parameters and settings
experts      parameters that differ between processes
neighbours   halo exchange between neighbouring ranks
peer_memory  memory that ranks of one machine share
"""
