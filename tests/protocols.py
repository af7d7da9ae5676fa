"""The type checker holds every class that rlpost ships to the protocol of its plug-in point (`make lint`); nothing runs this.

The builder gives objects without a type, so nobody else would notice a class that has left its protocol. A test sees to it
that every target of conf/ is listed.
"""

from collections.abc import Callable, Sequence

from rlpost.cluster.local import Local
from rlpost.cluster.protocol import Cluster
from rlpost.cluster.ray import Ray
from rlpost.cluster.slurm import Slurm
from rlpost.data.mixture import Mixture
from rlpost.data.stream import PromptStream
from rlpost.data.tasks import Addition, HubDataset, JsonLines, Parquet, ReasoningGym, Task
from rlpost.environments.calculator import Calculator
from rlpost.environments.protocol import Environment
from rlpost.environments.tools import Tools
from rlpost.models.sources import GGUFPackage, ModelSource, PathOrHub
from rlpost.models.tiny import TinyLlama, TinyVisionLlama
from rlpost.objective.advantages import (
    Advantage,
    BetaNormalized,
    GroupAdvantage,
    LeaveOneOut,
    RawReward,
    ReinforcePlusPlus,
)
from rlpost.objective.corrections import Correction, ImportanceSampling, OffPolicySequenceMask
from rlpost.objective.losses import CISPOLoss, ClippedLoss, GSPOLoss, Loss, ReinforceLoss, SAPOLoss
from rlpost.objective.reducers import ConstantDivisor, FunctionReducer, Reducer, SequenceMean, TokenMean, TokenSum
from rlpost.record.recorder import Recorder
from rlpost.rewards.code import CodeReward
from rlpost.rewards.environment import EnvironmentReward
from rlpost.rewards.format import FormatReward
from rlpost.rewards.function import RewardFunction
from rlpost.rewards.judge import JudgeReward
from rlpost.rewards.math import MathReward
from rlpost.rewards.model import ModelReward
from rlpost.rewards.number import NumberReward
from rlpost.rewards.reasoning_gym import ReasoningGymReward
from rlpost.rollout.engine import Engine
from rlpost.rollout.episodes import Episodes
from rlpost.rollout.filters import GroupFilter, RewardProcessor, SoftOverlongPenalty, VariedRewards
from rlpost.rollout.paged import PagedTransformersEngine
from rlpost.rollout.sampler import Sampler
from rlpost.rollout.server import VLLMServers
from rlpost.rollout.transformers import TransformersEngine
from rlpost.rollout.vllm import VLLMEngine
from rlpost.trainer.optimizer import AdamW, Optimizer, OptimizerFactory
from rlpost.types import Stateful

advantages: Sequence[Callable[..., Advantage]] = (
    *(BetaNormalized, GroupAdvantage, LeaveOneOut, RawReward, ReinforcePlusPlus),
)
losses: Sequence[Callable[..., Loss]] = (CISPOLoss, ClippedLoss, GSPOLoss, ReinforceLoss, SAPOLoss)
reducers: Sequence[Callable[..., Reducer]] = (ConstantDivisor, FunctionReducer, SequenceMean, TokenMean, TokenSum)
corrections: Sequence[Callable[..., Correction]] = (ImportanceSampling, OffPolicySequenceMask)
filters: Sequence[Callable[..., GroupFilter]] = (VariedRewards,)
reward_processors: Sequence[Callable[..., RewardProcessor]] = (SoftOverlongPenalty,)
rewards: Sequence[Callable[..., RewardFunction]] = (
    *(CodeReward, EnvironmentReward, FormatReward, JudgeReward, MathReward, ModelReward, NumberReward),
    ReasoningGymReward,
)
engines: Sequence[Callable[..., Engine]] = (
    *(Episodes, PagedTransformersEngine, TransformersEngine, VLLMEngine, VLLMServers),
)
environments: Sequence[Callable[..., Environment]] = (Calculator, Tools)
tasks: Sequence[Callable[..., Task]] = (Addition, HubDataset, JsonLines, Mixture, Parquet, ReasoningGym)
models: Sequence[Callable[..., ModelSource]] = (GGUFPackage, PathOrHub, TinyLlama, TinyVisionLlama)
clusters: Sequence[Callable[..., Cluster]] = (Local, Ray, Slurm)
optimizers: Sequence[Callable[..., OptimizerFactory]] = (AdamW,)
stateful: Sequence[Callable[..., Stateful]] = (BetaNormalized, Optimizer, PromptStream, Recorder, Sampler)
