"""ZeRO: optimizer state, and the sum of gradients, sharded over processes.

layout          where parameters lie in buckets, and which part of a bucket belongs to which rank: arithmetic only
groups          the processes that shard the state, and those that repeat it
arena           parameters that are laid out together, and the flat buffers that follow their layout
gradients       from gradients of parameters to sums over all processes, bucket by bucket, during backward passes
norms           norms of these sums, loss scales, clipping
weights         the weights that an update writes: parameters, master weights, remainders of bfloat16
state           moments and weights of this rank's shards, and a step of them; `scaled_state` in half precision
parameters      from updated shards to parameters, bucket by bucket, during forward passes
wait_on_use     parameters that wait for their values when they are first used
checkpoints     state dicts, of shards, whole tensors and sharded tensors
base            what DistributedFusedAdam and DistributedFusedLAMB have in common
lamb            what DistributedFusedLAMB has instead: gradients that stay with parameters, norms of whole parameters
optimizer       DistributedFusedAdam but for its state dicts
"""
