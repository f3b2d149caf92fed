"""ZeRO: optimizer state, and the sum of gradients, divided among processes.

layout       where parameters lie in buckets, and which part of a bucket belongs to which rank: arithmetic only
groups       the processes that divide the state, and those that repeat it
arena        parameters that are laid out together, and the buffers that follow their layout
gradients    from gradients of parameters to sums over all processes, bucket by bucket, during backward passes
parameters   from updated shards to parameters, bucket by bucket, during forward passes
pending      parameters that wait for their values when they are first used
"""
