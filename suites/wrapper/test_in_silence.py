"""What a wrapper might get wrong without a word: it does as one process does, or refuses.

An optimizer that steps in backward; parameters that the model itself reads in forward, as a penalty does; gradients
that are read while they accumulate; parameters assigned before forward or backward, or written behind whole ones;
options that differ within one tree.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, UNITS, Tower, batch, gradients, shown_gradients, tower, train_alone
from shardproof.suites.tower import trained_alone
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.wrapper.wrapping import original, strategies

pytestmark = pytest.mark.worlds(SEVERAL)
KEEP = ShardingStrategy.SHARD_GRAD_OP


class Penalised(Tower):
    """A tower whose forward adds the squares of all its parameters to each result."""

    seen: list[list[int]]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Note the shapes of the parameters once units inside have run, and add the penalty."""
        result = super().forward(rows)
        self.seen = [list(p.shape) for p in self.parameters()]
        return result + sum(p.square().sum() for p in self.parameters())


def _penalised() -> Penalised:
    model = Penalised()
    model.load_state_dict(tower().state_dict())
    return model


@pytest.mark.api("use_orig_params")
@pytest.mark.kills("StepsNotInBackward")
@expects("parameters by name", "one flat parameter")
def test_an_optimizer_steps_in_backward(bench: Bench) -> None:
    root = bench.wrapped(tower())
    bench.names.optimizer_in_backward(torch.optim.SGD, list(root.parameters()), {"lr": LR})
    bench.train(root)
    bench.same("parameters by name", bench.summoned(root), trained_alone(bench.ranks))
    flat = bench.wrapped(tower(), use_orig_params=False)
    bench.names.optimizer_in_backward(torch.optim.SGD, list(flat.parameters()), {"lr": LR})
    bench.refuses("one flat parameter", lambda: bench.train(flat))


@pytest.mark.api("use_orig_params")
@pytest.mark.kills("ShowsShardsInForward")
@parametrize(
    "strategy, units",
    param(ShardingStrategy.FULL_SHARD, (), id="full_shard", kills="ShowsShardsInASecondForward"),
    param(KEEP, (), id="shard_grad_op"),
    param(KEEP, UNITS, id="shard_grad_op-units", kills="ShowsShardsOfWhatItKeeps"),
)
@expects("shapes in forward", "this rank's results", "parameters after one step")
def test_a_model_may_read_its_parameters_in_forward(
    bench: Bench, strategy: ShardingStrategy, units: tuple[str, ...]
) -> None:
    """In the second of two forwards, the first of which has no backward and leaves parameters whole."""
    alone = _penalised()
    root = bench.wrapped(_penalised(), units, sharding_strategy=strategy)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    root(batch(bench.rank).to(bench.device))
    output = bench.train(root)
    bench.same("shapes in forward", root.module.seen, [list(p.shape) for p in alone.parameters()])
    bench.same("this rank's results", output.detach().cpu(), alone(batch(bench.rank)).detach())
    optimizer.step()
    train_alone(alone, bench.ranks)
    expected = {name: p.detach() - LR * p.grad for name, p in alone.named_parameters() if p.grad is not None}
    bench.same("parameters after one step", bench.summoned(root), expected)


@pytest.mark.api("use_orig_params")
@pytest.mark.kills("ComputesWithUnseenShards")
@expects("this rank's results")
def test_a_model_sees_whole_parameters_of_units_that_are_freed_or_refuses(bench: Bench) -> None:
    expected = _penalised()(batch(bench.rank)).detach()
    root = bench.wrapped(_penalised(), sharding_strategy=ShardingStrategy.FULL_SHARD)
    try:
        seen = root(batch(bench.rank).to(bench.device)).detach().cpu()
    except RuntimeError:  # refused
        seen = expected
    bench.same("this rank's results", seen, expected)


@pytest.mark.api("no_sync")
@pytest.mark.kills("ShowsZerosWhileAccumulating")
@strategies(ShardingStrategy.FULL_SHARD, KEEP)
@expects("gradients that accumulate")
def test_gradients_that_accumulate_are_own_ones_or_none(bench: Bench, strategy: ShardingStrategy) -> None:
    root = bench.wrapped(tower(), sharding_strategy=strategy)
    with root.no_sync():
        bench.train(root)
    own = {name: grad * bench.size for name, grad in gradients(tower(), [bench.rank]).items()}
    try:
        seen = {original(name): grad.cpu() for name, grad in shown_gradients(root).items()}
    except RuntimeError:  # refused
        seen = own
    bench.same("gradients that accumulate", seen, own)


@pytest.mark.api("use_orig_params")
@pytest.mark.kills("AcceptsReplacedParameters")
@expects("backward")
def test_backward_knows_the_parameters_of_forward(bench: Bench) -> None:
    """A strategy that keeps parameters from forward to backward cannot use new ones, of which each rank has a part."""
    root = bench.wrap(nn.Linear(3, 64, bias=False), sharding_strategy=KEEP)
    output = root(batch(bench.rank).to(bench.device))
    root.module.weight = nn.Parameter(torch.ones(64, 3, device=bench.device))
    bench.refuses("backward", lambda: output.sum().backward())


@pytest.mark.api("FlatParameter")
@pytest.mark.kills("DropsWhatIsAssignedBesideFlatParameters")
@expects("this rank's results")
def test_a_parameter_beside_a_flat_one_is_used_or_refused(bench: Bench) -> None:
    root, rows = bench.wrap(nn.Linear(3, 64, bias=False), use_orig_params=False), batch(bench.rank)
    root.module.weight = nn.Parameter(torch.ones(64, 3, device=bench.device))
    expected = rows.sum(1, keepdim=True).expand(-1, 64)
    try:
        seen = root(rows.to(bench.device)).detach().cpu()
    except RuntimeError:  # refused
        seen = expected
    bench.same("this rank's results", seen, expected)


@pytest.mark.api("summon_full_params")
@pytest.mark.kills("NeverWritesBack")
@expects("parameters after writes to those taken before")
def test_writes_behind_whole_parameters_are_kept_or_refused(bench: Bench) -> None:
    root = bench.wrap(nn.Linear(3, 64, bias=False))
    held, seen = list(root.parameters()), {"weight": torch.full((64, 3), 7.0)}
    try:
        with bench.api.summon_full_params(root), torch.no_grad():
            held[0].fill_(7)
        seen = bench.summoned(root)
    except RuntimeError:  # refused
        pass
    bench.same("parameters after writes to those taken before", seen, {"weight": torch.full((64, 3), 7.0)})


@pytest.mark.kills("AcceptsMixedTrees")
@parametrize("option", "use_orig_params", "limit_all_gathers")
@expects("a tree with both values")
def test_refuses_a_tree_with_two_values_of_one_option(bench: Bench, option: str) -> None:
    model = tower()
    model.stem = bench.wrap(model.stem, **{option: False})
    root = bench.wrap(model, **{option: True})
    bench.refuses("a tree with both values", lambda: root(batch(bench.rank).to(bench.device)), naming=option)


@pytest.mark.api("ignored_modules")
@pytest.mark.kills("ForgetsWhatToIgnore")
@expects("parameters of a root that is ignored")
def test_leaves_a_root_alone_that_it_is_to_ignore(bench: Bench) -> None:
    model = tower()
    try:
        root = bench.wrap(model, ignored_modules=[model])
    except ValueError:  # refused
        root = model
    shown = {original(name): p.detach().cpu() for name, p in root.named_parameters()}
    bench.same("parameters of a root that is ignored", shown, dict(tower().named_parameters()))
