"""The reducer: when which bucket is reduced, from the hooks of autograd to the end of a step.

reducer.py                             Reducer: what users call; agreement, recovery, and what changes between two steps
engine.py                              Engine: a step, in the order of time; step.py: which of its gradients are ready
parameter_hooks.py, backward_hooks.py  autograd hooks: a gradient is final, a backward begins, a backward has ended
plans.py, scheduler.py                 which parameters form which bucket, agreed on by all ranks
unused_parameters.py, wire_schedule.py features of a step, as plans are, and those of buckets/ (step_feature.py)
modes/                                 sync modes in which steps do not end with their own averages
"""
