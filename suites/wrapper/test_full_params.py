"""``summon_full_params``: the parameters inside, what persists afterwards, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from shardproof import ALONE, SEVERAL
from shardproof.suites.params import param
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import LR, Tower, batch, copies, gradients, parameters
from shardproof.suites.wrapper.wrapping import EACH_FORM, Form
from shardproof.suites.tower import shapes, shown_gradients, tower, trained_alone
from shardproof.suites.wrapper.wrapping import strategies

pytestmark = pytest.mark.api("summon_full_params")
FULL, KEEP, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
AFTERWARDS = "parameters afterwards"


@EACH_FORM
@strategies(FULL, KEEP, WHOLE)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("MisalignsWhatItSummons")
@expects("parameters inside", "shapes outside", "parameters after a forward", "parameters after a backward")
def test_shows_whole_parameters_by_their_names(bench: Bench, strategy: ShardingStrategy, form: Form) -> None:
    root = bench.wrapped(tower(), sharding_strategy=strategy, use_orig_params=form.use_orig_params)
    outside = shapes(root)
    bench.same("parameters inside", bench.summoned(root), parameters(tower()))
    bench.same("shapes outside", shapes(root), outside)
    root(batch(bench.rank))
    bench.same("parameters after a forward", bench.summoned(root), parameters(tower()))
    bench.train(root)
    bench.same("parameters after a backward", bench.summoned(root), parameters(tower()))


@EACH_FORM
@strategies(FULL, KEEP, WHOLE)
@pytest.mark.kills("ShowsFrozenOnesAsTrained")
@expects("which train inside")
def test_shows_which_parameters_train(bench: Bench, strategy: ShardingStrategy, form: Form) -> None:
    model = tower()
    model.middle[1].requires_grad_(False)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    root = bench.wrapped(model, sharding_strategy=strategy, use_orig_params=form.use_orig_params)
    with bench.api.summon_full_params(root, writeback=False):
        shown = {name: parameter.requires_grad for name, parameter in root.named_parameters()}
    bench.same("which train inside", shown, trained)


@pytest.mark.kills("MisalignsWhatItSummons")
@expects("parameters inside")
def test_shows_those_of_all_wrapped_modules_below(bench: Bench) -> None:
    roots = [bench.wrapped(tower()), bench.wrapped(tower(), units=("head",))]
    with bench.api.summon_full_params(nn.ModuleList(roots), writeback=False):
        got = [copies(root.named_parameters()) for root in roots]
    bench.same("parameters inside", got, [parameters(tower())] * 2)


@EACH_FORM
@strategies(FULL, KEEP)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverWritesBack", "ForgetsWritesAfterAnEvaluation")
@expects(AFTERWARDS, "an output afterwards")
def test_writes_back_what_was_changed(bench: Bench, strategy: ShardingStrategy, form: Form) -> None:
    """Also into the copies in another dtype that an evaluation may have left."""
    alone = tower()
    _change(alone)
    for precision in (None, MixedPrecision(param_dtype=torch.float64)):
        root = bench.wrapped(
            tower(),
            sharding_strategy=strategy,
            use_orig_params=form.use_orig_params,
            mixed_precision=precision,
        )
        with torch.no_grad():
            root(batch(bench.rank))
        with bench.api.summon_full_params(root):
            _change(root)
        bench.same(AFTERWARDS, bench.summoned(root), parameters(alone))
        output = root(batch(bench.rank)).detach().float()
        bench.same("an output afterwards", output, alone(batch(bench.rank)).detach())


@EACH_FORM
@pytest.mark.worlds(SEVERAL)  # with one rank there are no shards, and changes persist
@pytest.mark.kills("AlwaysWritesBack")
@expects(AFTERWARDS)
def test_forgets_what_was_changed_without_writing_back(bench: Bench, form: Form) -> None:
    root = bench.wrapped(tower(), use_orig_params=form.use_orig_params)
    with bench.api.summon_full_params(root, writeback=False):
        _change(root)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(tower()))


@EACH_FORM
@strategies(param(FULL, worlds=ALONE), WHOLE)
@pytest.mark.kills("UndoesWhatIsNotWrittenBack")
@expects(AFTERWARDS)
def test_keeps_what_was_changed_where_nothing_is_sharded(
    bench: Bench, strategy: ShardingStrategy, form: Form
) -> None:
    """Without writing back too: the whole parameters are what the rank holds."""
    root, alone = (
        bench.wrapped(tower(), sharding_strategy=strategy, use_orig_params=form.use_orig_params),
        tower(),
    )
    with bench.api.summon_full_params(root, writeback=False):
        _change(root)
    _change(alone)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(alone))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("WritesBackFromRank0")
@expects("all numbers, in the order of ranks", "what others see")
def test_writes_back_the_share_of_each_rank(bench: Bench) -> None:
    """Each rank writes its number everywhere, and each number persists only in its rank's share."""
    root = bench.wrapped(tower(), use_orig_params=False)
    with bench.api.summon_full_params(root), torch.no_grad():
        for parameter in root.parameters():
            parameter.fill_(bench.rank)
    after = bench.summoned(root)
    own = torch.cat([value.flatten() for name, value in after.items() if name.startswith(("stem", "head"))])
    bench.same(
        "all numbers, in the order of ranks",
        torch.unique_consecutive(own).tolist(),
        [float(rank) for rank, _ in enumerate(own.chunk(bench.size))],  # the last ones may have none
    )
    ours = torch.cat([value.flatten() for value in after.values()])
    everyone = [torch.empty_like(ours) for _ in bench.ranks]
    distributed.all_gather(everyone, ours)
    bench.same("what others see", everyone, [ours] * bench.size)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("AlwaysSummonsAll")
@expects("the root's own", "those of units", "whole ones of units")
def test_summons_the_root_alone(bench: Bench) -> None:
    root = bench.wrapped(tower())
    outside, whole = shapes(root), parameters(tower())
    with bench.api.summon_full_params(root, recurse=False, writeback=False):
        inside = copies(root.named_parameters())
    own = {name: value for name, value in whole.items() if not name.startswith("middle")}
    bench.same("the root's own", {name: inside[name] for name in own}, own)
    units = [list(value.shape) for name, value in inside.items() if name not in own]
    bench.same("those of units", units, [shape for name, shape in outside if "middle" in name])
    bench.same("whole ones of units", [n for n in inside if n not in own and inside[n].dim() == 2], [])


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SummonsOnAllRanks")
@expects("what the rank sees", "shapes outside")
def test_summons_on_rank_0_alone(bench: Bench) -> None:
    _summon_on_rank_0(bench, bench.wrapped(tower()))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
@expects("parameters inside", "where they are", "where they are afterwards")
def test_summons_to_the_host(bench: Bench) -> None:
    root = bench.wrapped(tower())
    with bench.api.summon_full_params(root, offload_to_cpu=True, writeback=False):
        places = {p.device.type for p in root.parameters()}
        bench.same("parameters inside", copies(root.named_parameters()), parameters(tower()))
    bench.same("where they are", places, {"cpu"})
    bench.same("where they are afterwards", {p.device.type for p in root.parameters()}, {bench.device.type})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
@expects("what the rank sees", "shapes outside", AFTERWARDS)
def test_summons_to_the_host_of_rank_0_alone(bench: Bench) -> None:
    root = bench.wrapped(tower())
    _summon_on_rank_0(bench, root, offload_to_cpu=True)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(tower()))


# Any: options of the context.
def _summon_on_rank_0(bench: Bench, root: Any, **options: Any) -> None:
    """Claim that rank 0 has whole parameters, others their shares, and all of them theirs afterwards."""
    outside = shapes(root)
    with bench.api.summon_full_params(root, rank0_only=True, writeback=False, **options):
        inside = shapes(root)
        if bench.rank == 0:
            bench.same("what the rank sees", copies(root.named_parameters()), parameters(tower()))
    if bench.rank != 0:
        bench.same("what the rank sees", [shape for _, shape in inside], [shape for _, shape in outside])
    bench.same("shapes outside", shapes(root), outside)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
@expects(AFTERWARDS)
def test_writes_back_from_the_host(bench: Bench) -> None:
    root, alone = bench.wrapped(tower()), tower()
    with bench.api.summon_full_params(root, offload_to_cpu=True):
        _change(root)
    _change(alone)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(alone))


@pytest.mark.worlds(SEVERAL)
@strategies(
    param(FULL, kills="SummonsNoGradients"),
    param(KEEP, kills="SummonsNoGradients"),
    param(WHOLE, kills="MisalignsWhatItSummons"),
)
@expects("gradients before there are any", "gradients inside", AFTERWARDS)
def test_shows_whole_gradients(bench: Bench, strategy: ShardingStrategy) -> None:
    root = bench.wrapped(tower(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    with bench.api.summon_full_params(root, with_grads=True, writeback=False):
        bench.same("gradients before there are any", shown_gradients(root), {})
    bench.train(root)
    with bench.api.summon_full_params(root, with_grads=True, writeback=False):
        got = shown_gradients(root)
    bench.same("gradients inside", got, gradients(tower(), bench.ranks))
    optimizer.step()
    bench.same(AFTERWARDS, bench.summoned(root), trained_alone(bench.ranks))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SummonsNoGradients")
@expects("shapes inside", AFTERWARDS)
def test_writes_gradients_back(bench: Bench) -> None:
    """Gradients that were halved inside halve the update."""
    root = bench.wrapped(tower())
    optimizer = torch.optim.SGD(root.parameters(), lr=2 * LR)
    bench.train(root)
    with bench.api.summon_full_params(root, with_grads=True):
        inside = {name: list(gradient.shape) for name, gradient in shown_gradients(root).items()}
        for parameter in root.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2)
    bench.same("shapes inside", inside, dict(shapes(tower())))
    optimizer.step()
    bench.same(AFTERWARDS, bench.summoned(root), trained_alone(bench.ranks))


@pytest.mark.kills("TakesEveryCombination")
@expects("rank 0 alone that writes back", "gradients on the host", "gradients of flat parameters", AFTERWARDS)
def test_refuses_what_cannot_be_combined(bench: Bench) -> None:
    root = bench.wrapped(tower())
    flat = bench.wrapped(tower(), use_orig_params=False)
    _refuses(bench, "rank 0 alone that writes back", root, rank0_only=True, writeback=True)
    _refuses(bench, "gradients on the host", root, with_grads=True, offload_to_cpu=True)
    _refuses(bench, "gradients of flat parameters", flat, with_grads=True)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(tower()))
    bench.train(root)


@pytest.mark.kills("SummonsAnywhere")
@expects("summoning inside", "parameters inside", AFTERWARDS)
def test_refuses_to_summon_what_is_summoned(bench: Bench) -> None:
    root = bench.wrapped(tower())
    with bench.api.summon_full_params(root, writeback=False):
        _refuses(bench, "summoning inside", root)
        bench.same("parameters inside", copies(root.named_parameters()), parameters(tower()))
    bench.same(AFTERWARDS, bench.summoned(root), parameters(tower()))


@pytest.mark.kills("SummonsAnywhere")
@expects("summoning in forward")
def test_refuses_to_summon_in_forward(bench: Bench) -> None:
    class Impatient(Tower):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            _refuses(bench, "summoning in forward", roots[0])
            return super().forward(rows)

    roots: list[Any] = []
    model = Impatient()
    model.load_state_dict(tower().state_dict())
    roots.append(bench.wrapped(model))
    bench.train(roots[0])


@pytest.mark.kills("SummonsAnywhere")
@expects("summoning in backward")
def test_refuses_to_summon_in_backward(bench: Bench) -> None:
    root = bench.wrapped(tower())

    def look(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: _refuses(bench, "summoning in backward", root))  # type: ignore[no-untyped-call]

    root.stem.register_forward_hook(look)
    bench.train(root)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverWritesBack")
@expects("the exception", "shapes afterwards", AFTERWARDS)
def test_frees_and_writes_back_after_an_exception(bench: Bench) -> None:
    root = bench.wrapped(tower())
    outside = shapes(root)

    def leave() -> None:
        with bench.api.summon_full_params(root):
            _change(root)
            raise KeyError("of the caller")

    bench.refuses("the exception", leave, KeyError)
    bench.same("shapes afterwards", shapes(root), outside)
    alone = tower()
    _change(alone)
    bench.same(AFTERWARDS, bench.summoned(root), parameters(alone))
    bench.train(root)


# Any: the engine's wrapper and its options.
def _refuses(bench: Bench, subject: str, root: Any, **options: Any) -> None:
    def enter() -> None:
        with bench.api.summon_full_params(root, **{"writeback": False, **options}):
            pass

    bench.refuses(subject, enter)


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(1)
