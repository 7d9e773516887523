"""The reducer: when which bucket is reduced, from the hooks of autograd to the end of a step.

parameter_hooks.py, backward_hooks.py  autograd says that a gradient is final, that a backward begins and ends
readiness.py, step.py                  which buckets of the current step are ready
pipeline.py                            launches and finishes buckets, in the plan's order
plans.py, scheduler.py                 which parameters form which bucket, agreed on by all ranks
modes/                                 steps that do not end with their own averages
reducer.py                             Reducer: the states of a step, agreement, recovery
"""
