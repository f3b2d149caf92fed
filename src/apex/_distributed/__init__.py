"""What everything that runs in several processes shares.

collectives  all-reduce, reduce-scatter and all-gather, asynchronous, on any backend
reducer      gradients in buckets: which are complete, and the order in which all processes send them
groups       process groups and meshes with the default group's timeout
comparison   whether all processes have the same parameters, in the same order
"""
