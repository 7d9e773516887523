"""Classes for frameworks. Each module needs its framework, which is no dependency of this package.

    fusedreduce.integrations.lightning             strategies and precision plugins of `lightning`, Trainer and Fabric
    fusedreduce.integrations.pytorch_lightning     the same of `pytorch_lightning`

For frameworks that construct torch's DistributedDataParallel themselves, use `fusedreduce.install()`. docs/frameworks/
has a page for each.
"""
