"""One unit computes in a dtype of its own, and its inputs and outputs, and no others, are cast by the plan."""

from __future__ import annotations

import pytest
import torch

from shardproof import POWERS_OF_TWO, SEVERAL, Dtype, Grouping, Layout, MatchesOracle, Notes, NotesUnitDtypes
from shardproof import Op, Phase, RanksAgree, Select, Trial, UnitDtypes, Window, dtypes_of
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.fixtures.precision import EXACT_NARROW
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _gathers(unit: str) -> Select:
    return Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,), units=(unit,), window=Window.TRAINING)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.worlds(POWERS_OF_TWO)
@pytest.mark.kills("IgnoresTheDtypeOfAUnit")
@parametrize(
    "own, of_root, noted",
    param((BF16, None, True), None, "bfloat16, bfloat16, bfloat16", id="casts"),
    param((F16, None, True), None, "float16, float16, float16", id="float16"),
    param((BF16, None, False), None, "float32, bfloat16, bfloat16", id="leaves", kills="CastsInputsUnasked"),
    param((BF16, F32, True), None, "bfloat16, bfloat16, float32", id="casts_back"),
    param(
        (BF16, None, True),
        F32,
        "bfloat16, bfloat16, bfloat16",
        id="beside_another",
        kills="PassesTheRootsOutputDtypeOn",
    ),
)
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_a_unit_has_dtypes_of_its_own(
    trial: Trial,
    layout: Layout,
    own: tuple[torch.dtype, torch.dtype | None, bool],
    of_root: torch.dtype | None,
    noted: str,
) -> None:
    dtypes = UnitDtypes(unit="narrow", compute_dtype=own[0], output_dtype=own[1], casts_inputs=own[2])
    training = train(
        EXACT_NARROW,
        EXACT_SGD,
        layout=layout,
        grouping=Grouping.REQUIRED,
        unit_dtypes=(dtypes,),
        output_dtype=of_root,
        reduce_dtype=F32,
        steps=1,
        script=NotesUnitDtypes(units=("wide", "narrow")),
    )
    crossing = [
        Dtype(select=_gathers("narrow"), dtype=str(own[0]).removeprefix("torch.")),
        Dtype(select=_gathers("wide"), dtype="float32"),
    ]
    trial.holds(
        training,
        MatchesOracle(),
        Notes(subject=dtypes_of("narrow"), value=noted),
        Notes(subject=dtypes_of("wide"), value="float32, float32, float32"),
        *(crossing if layout is Layout.SHARD else []),
        RanksAgree(),
    )
