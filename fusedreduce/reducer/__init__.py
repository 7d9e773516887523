"""The reducer: when which bucket is reduced, from the hooks of autograd to the end of a step.

parameter_hooks.py, backward_hooks.py  autograd hooks: a gradient is final, a backward begins, a backward has ended
step_cycle.py, step.py                 when a step begins and ends; which buckets of it are ready
pipeline.py                            launches and finishes buckets, in the plan's order
plans.py, scheduler.py                 which parameters form which bucket, agreed on by all ranks
modes/                                 sync modes in which steps do not end with their own averages
base.py, reducer.py                    Reducer: agreement and recovery, and what users call
"""
