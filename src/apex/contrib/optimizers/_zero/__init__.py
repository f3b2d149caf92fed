"""ZeRO: optimizer state and reduced gradients, sharded over processes.

layout          layout of parameters in buckets, and of buckets in shards of ranks: arithmetic only
groups          the processes that divide the state, and their replicas
arena           parameters that are laid out together, and their flat buffers
gradients       reduction of gradients over all processes, bucket by bucket, during backward passes
norms           norms of the reduced gradients, loss scales, clipping
weights         the weights that an update writes: parameters, master weights, remainders of bfloat16
state           moments and weights of this rank's shards, and their update; `scaled_state` in half precision
parameters      all-gather of updated parameters, bucket by bucket, during forward passes
wait_on_use     parameters that wait for their values when they are first used
checkpoints     state dicts: shards, whole tensors, sharded tensors
base            ShardedOptimizer, the base of DistributedFusedAdam and DistributedFusedLAMB
lamb            reducer, master weights and update of DistributedFusedLAMB
optimizer       ZeroOptimizer: DistributedFusedAdam without its state dicts
subclassing     upstream's private methods, for subclasses of DistributedFusedAdam
"""
