"""The public names, which `fusedreduce` hands on when one of them is asked for."""

import logging

import torch

from . import collective as collective
from .comm.differentiable import all_reduce as all_reduce
from .comm.init_process_group import init_process_group as init_process_group
from .comm.local.group import LocalGroup as LocalGroup
from .comm.local.strategies import Centralized as Centralized
from .comm.local.strategies import Ring as Ring
from .comm.local.strategies import Tree as Tree
from .comm.process_group import ProcessGroupCommunicator as ProcessGroupCommunicator
from .config import Asynchronous as Asynchronous
from .config import BoundedStaleness as BoundedStaleness
from .config import FlushReport as FlushReport
from .config import ReduceConfig as ReduceConfig
from .config import Synchronous as Synchronous
from .errors import AgreementError as AgreementError
from .errors import CollectiveError as CollectiveError
from .errors import FusedReduceError as FusedReduceError
from .errors import NonFiniteGradientError as NonFiniteGradientError
from .errors import TraceError as TraceError
from .errors import UnsupportedWireError as UnsupportedWireError
from .kernels.cast import CastWire as CastWire
from .kernels.encodings import Encoding as Encoding
from .kernels.packer import Packer as Packer
from .optim.clip import clip_grad_norm_ as clip_grad_norm_
from .optim.grad_scaler import FusedGradScaler as FusedGradScaler
from .parallel.create import create_data_parallel as create_data_parallel
from .parallel.create import create_distributed_data_parallel as create_distributed_data_parallel
from .parallel.data_parallel import DataParallel as DataParallel
from .parallel.ddp import DistributedDataParallel as DistributedDataParallel
from .parallel.fsdp import FSDPComms as FSDPComms
from .parallel.fsdp import set_fsdp_comms as set_fsdp_comms
from .parallel.hook import FusedHookState as FusedHookState
from .parallel.hook import fused_hook as fused_hook
from .parallel.install import install as install
from .parallel.install import uninstall as uninstall
from .parallel.sync_server import SyncServer as SyncServer
from .parallel.wrapper_reducer import reducer_of as reducer_of
from .planning.bucketing import BucketCaps as BucketCaps
from .reducer.reducer import Reducer as Reducer
from .trace.collective_metrics import measure_collectives as measure_collectives
from .wires import WIRES as WIRES

NEWEST_TORCH = "2.15"  # of those in docs/versions.md
if tuple(map(int, torch.__version__.split(".")[:2])) > tuple(map(int, NEWEST_TORCH.split("."))):
    logging.getLogger(__name__).warning(
        "fusedreduce has been tested with torch up to %s; this is %s", NEWEST_TORCH, torch.__version__
    )
