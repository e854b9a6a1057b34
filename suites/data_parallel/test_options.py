"""Options and hooks of DistributedDataParallel, its refusals, and models that it must reduce unchanged."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

from shardproof import APART, FOURS, SEVERAL, Op
from shardproof.suites.data_parallel.bench import Bench, expects
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, batch, copies, fill, gradients, shown_gradients, tower

GRADIENTS = "gradients"
REFUSAL = "the refusal"


def _mean(bench: Bench, steps: tuple[int, ...] = (0,)) -> dict[str, torch.Tensor]:
    """Compute the gradients of all ranks, with the loss weights of `train`."""
    return gradients(tower(), bench.ranks, steps)


def _own(root: Any) -> dict[str, torch.Tensor]:
    return shown_gradients(root.module)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SendsBuffersUnasked")
@parametrize("is_asked", True, False, ids=["sent", "left_alone"])
@expects("buffers in forward")
def test_buffers_are_those_of_the_first_rank_where_asked_for(bench: Bench, is_asked: bool) -> None:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )  # before torch 2.13, pytorch#178054
    options: dict[str, Any] = {} if is_asked else {name: False}
    root = bench.wrap(tower(), **options)
    for _ in range(2):
        root.module.offset.fill_(float(bench.rank))
        root(batch(bench.rank).to(bench.device))
    expected = 0.0 if is_asked or bench.rank == 0 else float(bench.rank)
    bench.same("buffers in forward", root.module.offset.item(), expected)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "cap, compiles",
    param(1e-6, False, id="small", kills="PacksAsItLikes"),
    param(25.0, False, id="large", kills="PacksAsItLikes"),
    param(25.0, True, id="compiled", kills="SumsWhatItWraps", worlds=APART),
)
@expects("the number of reductions", GRADIENTS)
def test_buckets_are_as_large_as_asked_for(bench: Bench, cap: float, compiles: bool) -> None:
    root = bench.wrap(tower(), bucket_cap_mb=cap)
    if compiles:
        root.compile(backend="aot_eager")
    for _ in range(2):  # buckets are rebuilt after the first backward
        root.zero_grad()
        already = len(bench.ledger())
        bench.train(root)
    reductions = [e for e in bench.ledger()[already:] if e.op is Op.ALL_REDUCE]
    bench.same("the number of reductions", len(reductions), len([*root.parameters()]) if cap < 1 else 1)
    bench.same(GRADIENTS, _own(root), _mean(bench))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("IgnoresCommHooks")
@parametrize("name", "allreduce_hook", "fp16_compress_hook", "of_the_caller")
@expects("what crossed", GRADIENTS, REFUSAL)
def test_a_hook_reduces_within_its_rounding(bench: Bench, name: str) -> None:
    root, seen = bench.wrap(tower()), list[int]()

    def by_hand(state: list[int], bucket: Any) -> Any:
        state.append(bucket.buffer().numel())
        tensor = bucket.buffer().double().div_(bench.size)
        work = distributed.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0].float())

    by_hand.__annotations__.clear()  # DDP accepts no annotations, or types; these are strings
    hook = getattr(default_hooks, name, by_hand)
    root.register_comm_hook(seen if hook is by_hand else None, hook)
    already = len(bench.ledger())
    bench.train(root)
    dtype = {"fp16": "float16", "allr": "float32"}.get(name[:4], "float64")
    crossed = {e.dtype for e in bench.ledger()[already:] if e.op is Op.ALL_REDUCE}
    bench.same("what crossed", (crossed, sum(seen)), ({dtype}, _numel(root) if hook is by_hand else 0))
    eps = torch.finfo(getattr(torch, dtype)).eps
    bench.near(GRADIENTS, _own(root), _mean(bench), tolerance=eps * (1 + bench.size))
    bench.refuses(REFUSAL, lambda: root.register_comm_hook(None, hook), RuntimeError, naming="once")


def _numel(root: nn.Module) -> int:
    return sum(parameter.numel() for parameter in root.parameters())


class _Sometimes(nn.Module):
    """A layer for every forward, and one only for positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Choose by the sign of the first number."""
        rows = self.always(rows)
        result: torch.Tensor = self.sometimes(rows) if float(rows.detach()[0, 0]) > 0 else rows[:, :1]
        return result


def _with_signs(bench: Bench, signs: tuple[int, ...], **options: Any) -> Any:
    """Train on numbers of these signs, one after the other."""
    model = _Sometimes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model.always.bias.zero_()
    root = bench.wrap(model, **options)
    for sign in signs:
        root(torch.full((2, 3), float(sign), device=bench.device)).sum().backward()
    return root


_REFUSALS: dict[str, tuple[Callable[[Bench], object], str]] = {
    "parameters_that_go_unused": (
        lambda b: _with_signs(b, (-1, 1)),
        "did not receive grad|find_unused_parameters",
    ),
    "a_graph_that_is_not_static": (
        lambda b: _with_signs(b, (1, -1, 1), static_graph=True),
        "training graph has changed|did not receive grad|static",
    ),
    "lazy_parameters": (lambda b: b.wrap(nn.LazyLinear(3)), "uninitialized|lazy"),
    "a_list_of_devices": (lambda b: b.wrap(tower(), device_ids=[0, 1]), "device"),
    "nothing_to_train": (lambda b: b.wrap(tower().requires_grad_(False)), "requires? (a )?grad"),
}


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("WrapsWithoutALook")
@parametrize("name", *_REFUSALS)
@expects(REFUSAL)
def test_refuses(bench: Bench, name: str) -> None:
    provoke, words = _REFUSALS[name]
    bench.refuses(REFUSAL, lambda: provoke(bench), naming=words)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps")
@expects(GRADIENTS)
def test_keeps_the_graph_of_gradients_where_asked_for(bench: Bench) -> None:
    root, alone = bench.wrap(nn.Linear(3, 3)), nn.Linear(3, 3)
    for model in (root.module, alone):
        fill(model)
    (root(batch(bench.rank).to(bench.device)).sum() * bench.size).backward(create_graph=True)
    for rank in bench.ranks:
        alone(batch(rank)).sum().backward()
    bench.same(GRADIENTS, {name: g.detach() for name, g in _own(root).items()}, shown_gradients(alone))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps")
@expects("the output", GRADIENTS)
def test_a_functional_call_is_a_call(bench: Bench) -> None:
    root = bench.wrap(tower())
    rows = batch(bench.rank).to(bench.device)
    own = {f"module.{name}": p for name, p in root.module.named_parameters()}
    output = functional_call(root, own, (rows,))
    bench.same("the output", output.detach().cpu(), tower()(rows.cpu()).detach())
    (output.sum() * bench.size).backward()
    bench.same(GRADIENTS, _own(root), _mean(bench))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps", "LaysGradientsByRows")
@expects("formats", GRADIENTS)
def test_gradients_keep_formats_of_memory(bench: Bench) -> None:
    convolution = nn.Conv2d(3, 4, 2, bias=False)
    nn.init.ones_(convolution.weight)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    root = bench.wrap(convolution, gradient_as_bucket_view=True)
    images = torch.arange(54.0).view(2, 3, 3, 3) + bench.rank
    root(images.to(bench.device)).sum().backward()
    (gradient,) = _own(root).values()
    bench.same("formats", gradient.is_contiguous(memory_format=torch.channels_last), True)
    alone = nn.Conv2d(3, 4, 2, bias=False)
    nn.init.constant_(alone.weight, 1.0)
    for rank in bench.ranks:
        (alone(images - bench.rank + rank).sum() / bench.size).backward()
    bench.near(GRADIENTS, gradient.contiguous().cpu(), shown_gradients(alone)["weight"], tolerance=1e-5)


class _Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(3, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.125)

    def forward(self, sequences: Any) -> torch.Tensor:
        """Return the layer's output for all of them."""
        result: torch.Tensor = self.layer(sequences)[0].data
        return result


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps")
@expects(GRADIENTS)
def test_takes_packed_sequences(bench: Bench) -> None:
    def packed(rank: int) -> Any:
        return pack_sequence([torch.ones(n, 3, device=bench.device) + rank for n in (3, 1)])

    root, alone = bench.wrap(_Packed()), _Packed().to(bench.device)
    root(packed(bench.rank)).sum().backward()
    for rank in bench.ranks:
        (alone(packed(rank)).sum() / bench.size).backward()
    bench.near(GRADIENTS, _own(root), shown_gradients(alone), tolerance=1e-5)


@pytest.mark.worlds(APART)
@pytest.mark.kills("SumsWhatItWraps")
@expects("the layout", GRADIENTS)
def test_reduces_sparse_gradients_as_they_are(bench: Bench) -> None:
    root = bench.wrap(nn.Embedding(2 * bench.size, 3, sparse=True))
    root(torch.tensor([bench.rank, 2 * bench.size - 1], device=bench.device)).sum().backward()
    (gradient,) = _own(root).values()
    bench.same("the layout", gradient.layout, torch.sparse_coo)
    expected = torch.zeros(2 * bench.size, 3)
    expected[: bench.size] = 1 / bench.size
    expected[-1] = 1.0
    bench.same(GRADIENTS, gradient.to_dense().cpu(), expected)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesInItsNoSync")
@parametrize("levels", param(1, id="all"), param(2, id="by_halves", worlds=FOURS))
@expects("parameters of each rank", "parameters of all")
def test_models_that_part_are_averaged_now_and_then(bench: Bench, levels: int) -> None:
    root = bench.wrap(tower())
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    sizes = OrderedDict([(2, bench.size // 2), (4, bench.size)])  # of the groups that average, by period
    averager: Any = PeriodicModelAverager(period=2, warmup_steps=0)
    if levels > 1:
        averager = HierarchicalModelAverager(sizes)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with root.no_sync():
        root(batch(bench.rank).to(bench.device)).sum().backward()
    optimizer.step()
    moved = [_stepped(rank) for rank in bench.ranks]
    bench.same("parameters of each rank", copies(root.module.named_parameters()), moved[bench.rank])
    averager.step = 2  # the caller's steps, of which every second one averages
    averager.average_parameters(root.parameters())
    together = bench.size // levels
    mine = moved[bench.rank // together * together :][:together]
    mean = {name: sum(each[name] for each in mine) / together for name in mine[0]}
    bench.near("parameters of all", copies(root.module.named_parameters()), mean, tolerance=1e-5)


def _stepped(rank: int) -> dict[str, torch.Tensor]:
    """Take a step in one process with the rows of one rank."""
    model = tower()
    learnt = gradients(model, [rank])
    return {name: p.detach() - LR * learnt[name] for name, p in model.named_parameters()}


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps")
@parametrize("fails", False, True, ids=["by_wish", "after_a_failure"])
@expects("gradients of the first group", GRADIENTS)
def test_goes_on_in_another_group(bench: Bench, fails: bool) -> None:
    model = tower()
    for moment in ("gradients of the first group", GRADIENTS):
        group = distributed.new_group([*bench.ranks])
        root = bench.wrap(model, process_group=group)
        root.zero_grad()
        bench.train(root)
        bench.same(moment, _own(root), _mean(bench))
        if fails:
            with contextlib.suppress(RuntimeError):
                root(torch.ones(1, 1, device=bench.device))  # of a shape that the model does not accept
            # A rank that is ahead would destroy the group during another one's last call.
            distributed.barrier()
            distributed.destroy_process_group(group)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SumsWhatItWraps")
@expects(GRADIENTS)
def test_layers_may_have_no_outputs(bench: Bench) -> None:
    model = nn.ModuleDict({"empty": nn.Linear(3, 0), "tower": tower()})
    model.forward = lambda rows: model["tower"](rows) + model["empty"](rows).sum()
    root = bench.wrap(model)
    bench.train(root)
    got = {name.removeprefix("tower."): g for name, g in _own(root).items() if name.startswith("tower")}
    bench.same(GRADIENTS, got, _mean(bench))


@pytest.mark.worlds(APART)
@pytest.mark.kills("SumsWhatItWraps")
@parametrize("accumulates", False, True, ids=["each", "no_sync"])
@expects(GRADIENTS)
def test_compiled_replicas_train_as_they_do_uncompiled(bench: Bench, accumulates: bool) -> None:
    root = bench.wrap(tower())
    root.compile(backend="aot_eager")
    if accumulates:
        with root.no_sync():
            bench.train(root, step=1)
    bench.train(root)
    bench.same(GRADIENTS, _own(root), _mean(bench, (0, 1) if accumulates else (0,)))
