"""The entries of mutants whose sins only a CUDA device shows."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Buffers, Offload, Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="CountsOnTheHost",
        engine_spec="engine.mutants.device:CountsOnTheHost",
        sin="outputs are scaled by the number of forwards so far, which the host counts",
        thread="pytorch/pytorch#109774",
        kills_on=Condition(world_size=1, plan=Plan(demands=frozenset({Capability.GRAPHS}))),
    ),
    Mutant(
        name="CopiesGradientsOneByOne",
        engine_spec="engine.mutants.device:CopiesGradientsOneByOne",
        sin="every gradient is copied by a kernel of its own",
        thread="deepspeedai/DeepSpeed#7371",
        kills_on=Condition(because="only a CUDA device has kernels to count"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="BuffersWhereItLikes",
        engine_spec="engine.mutants.device:BuffersWhereItLikes",
        sin="buffers of collectives are not in the memory that was asked for",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            plan=Plan(buffers=Buffers.GROUP), because="only a CUDA device has pools to tell apart"
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="DropsThePinnedCopy",
        engine_spec="engine.mutants.device:DropsThePinnedCopy",
        sin="parameters on the host are not in pinned memory although that was asked for",
        thread="pytorch/pytorch#70639",
        kills_on=Condition(
            world_size=1,
            plan=Plan(offload=Offload.PINNED),
            because="where there is no GPU no memory is pinned",
        ),
        trace=Trace.STATE,
    ),
)
