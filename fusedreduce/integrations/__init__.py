"""Classes for frameworks that ask for one of their own kind. Each module needs its framework, which is no dependency.

    fusedreduce.integrations.lightning             strategies and precision plugins of `lightning`, Trainer and Fabric
    fusedreduce.integrations.pytorch_lightning     the same of `pytorch_lightning`

Frameworks that build torch's DistributedDataParallel themselves, with no place for another class, take
`fusedreduce.install()`. docs/frameworks/ has a page for each.
"""
