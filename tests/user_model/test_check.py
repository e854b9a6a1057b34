"""`shardproof check` judges a user's model, and detects wrong engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardproof.harness.cases.batch import microbatch_seed
from shardproof.harness.cli.check_in_tests import check
from shardproof.harness.cli.main import main
from shardproof.harness.runner.user_model.read import read_model
from tests.shell import python
from tests.user_model.models import GOOD, LOSS, Check, with_optimizer


def test_a_right_engine_is_proven(check: Check) -> None:
    shown = check("torch.fsdp2", "-k", "trains or frees")
    assert "proven trains as one process does" in shown
    assert "proven frees shards after forward" in shown
    assert "not proven order of streams and lifetimes of memory (--thorough)" in shown
    precise = {
        m[2]: float(m[1]) for m in re.finditer(r"error of ([0-9.e-]+)% of any (gradient|update)", shown)
    }
    assert 0 < precise["gradient"] < 1
    assert 0 < precise["update"] < 10


def test_a_known_defect_is_named_and_a_known_failure_excused(file: Path, check: Check) -> None:
    file.write_text(GOOD.replace(LOSS, with_optimizer("torch.optim.SGD(p, lr=0.1)")))
    shown = check("torch.ddp", "-k", "resumes or trains", code=1)
    assert "CRASHED resumes from its state: known defect of torch" in shown
    assert "SGD without momentum has none. (https://github.com/" in shown
    known = file.with_name("known.toml")
    known.write_text(
        '[[expectation]]\nengine = "torch.ddp"\ncase = "user_model/*test_resumes*"\nverdict = "CRASHED"\n'
        'shows = "*Expected device*"\nreason = "We do not resume."\nlink = "https://example.org/1"\n'
        "expiry = 2099-01-01\n"
    )
    shown = check("torch.ddp", "-k", "resumes or trains", "--expectations", str(known))
    assert "known resumes from its state: We do not resume. (https://example.org/1)" in shown


def test_a_case_that_does_not_apply_is_listed_with_the_reason(check: Check) -> None:
    shown = check(
        "torch.fsdp2",
        "-k",
        "each_unit_once or two_replicas or clips or keeps_gathered",
        "--world",
        "threads:3",
        text=GOOD.replace("for block in self.blocks:", "for block in (*self.blocks, self.blocks[0]):"),
    )
    assert "left out gathers and reduces each unit once: its unit 'blocks.0' is called 2 times" in shown
    assert "left out shards two replicas: needs two replicas of equal size" in shown


def test_a_computation_in_bfloat16_is_proven_however_it_rounds(check: Check) -> None:
    assert "proven computes in bfloat16" in check("torch.fsdp2", "-k", "bfloat16")


_TABLE = "        self.register_buffer('table', torch.linspace(0.9, 1.1, 6))\n"
_BUFFERED = GOOD.replace("        self.out =", f"{_TABLE}        self.out =")


def test_buffers_keep_their_dtype_where_parameters_compute_in_bfloat16(check: Check) -> None:
    """Engines do not cast tables of rotations; models cast them where they use them."""
    buffered = _BUFFERED.replace("self.normed(x)", "self.normed(x * self.table.to(x.dtype))")
    assert "proven computes in bfloat16" in check("torch.fsdp2", "-k", "bfloat16", text=buffered)


def test_a_computation_in_bfloat16_need_not_move_a_parameter_with_a_small_gradient(
    file: Path, check: Check
) -> None:
    """Plain descent changes ones by less than a rounding in the norms of a query's low rank, in models of experts."""
    gain = "self.gain = nn.Parameter(torch.ones(6))\n        self.out ="
    file.write_text(
        GOOD.replace("self.out =", gain, 1).replace("tanh(block(x))", "tanh(block(x + 1e-5 * self.gain))")
    )
    assert "gain" in read_model(f"{file}:Mine", limit_s=60)[0].facts.slow
    assert "proven computes in bfloat16" in check("torch.fsdp2", "-k", "bfloat16")


def test_a_model_that_computes_in_no_bfloat16_is_left_out(check: Check) -> None:
    """A buffer of float32 promotes the activations, which the next layer then refuses."""
    buffered = _BUFFERED.replace("self.normed(x)", "self.normed(x * self.table)")
    shown = check("torch.fsdp2", "-k", "bfloat16 or trains", text=buffered)
    assert "left out computes in bfloat16 and reduces in float32: it raises RuntimeError in bfloat16" in shown


def test_a_wrong_engine_is_caught_with_its_cause(check: Check) -> None:
    shown = check("SumsInsteadOfAveraging", "-k", "trains", code=1)
    assert "exactly 2 x the reference" in shown
    assert "shardproof check" in shown


_AUTOCAST = """
import torch
from torch import nn

class Net(nn.Sequential):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x).float()

class Mine:
    def build(self):
        parts = [nn.Sequential(nn.Linear(n, 32), nn.LayerNorm(32), nn.GELU()) for n in (6, 32)]
        return Net(*parts, nn.Linear(32, 2))
    def batch(self, generator):
        return torch.randn(3, 6, generator=generator)
    def loss(self, output, batch):
        return (output - batch[:, :2]).square().mean()
"""


@pytest.mark.parametrize(
    ("engine", "code"),
    [("torch.fsdp2", 0), ("LosesStateInAnotherWorld", 1), ("AlignsStateForTheWorldBefore", 1)],
)
def test_a_start_is_judged_however_noisy_the_steps_before_were(engine: str, code: int, check: Check) -> None:
    """Under autocast the noise hides a wrong factor of a gradient, but not a parameter that was not loaded."""
    shown = check(engine, "-k", "starts", text=_AUTOCAST, code=code)
    assert ("proven starts from what other ranks saved" in shown) == (code == 0)
    assert "an error of" not in shown


def test_a_schedule_follows_the_optimizer_and_is_resumed(check: Check) -> None:
    schedule = "    def scheduler(self, o):\n        return torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.25**n)\n"
    text = GOOD.replace(LOSS, schedule + with_optimizer("torch.optim.SGD(p, lr=0.5, momentum=0.9)"))
    shown = check("torch.fsdp2", "-k", "trains or resumes", text=text)
    assert "proven trains as one process does proven resumes from its state" in shown


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_compiled_model_is_judged(world: str, check: Check) -> None:
    """FSDP1 gathers inside the compiled forward: the harness there must not be compiled too."""
    whole = "net = Net()\n        net.compile(backend='eager')\n        return net"
    assert "proven" in check(
        "torch.fsdp1", "-k", "trains", "--world", world, text=GOOD.replace("return Net()", whole)
    )


def test_a_fresh_model_has_no_gradients_of_parameters_outside_the_optimizer(check: Check) -> None:
    """No call clears these gradients, so they add up until the state is loaded into another model."""
    some = "torch.optim.SGD([q for q in p if q.ndim == 2], lr=0.1, momentum=0.9)"
    shown = check("torch.ddp", "-k", "resumes or starts", text=GOOD.replace(LOSS, with_optimizer(some)))
    assert "proven resumes from its state proven starts from what other ranks saved" in shown


_SPARSE = """
import torch
from torch import nn

class Mine:
    def build(self):
        return nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Tanh(), nn.Linear(4, 2))
    def batch(self, generator):
        return torch.randint(11, (3, 5), generator=generator)
    def loss(self, output, batch):
        return (output - batch[..., None] / 11).square().mean()
"""


def test_sparse_gradients_are_judged_where_ranks_are_processes(
    check: Check,
) -> None:
    refused = check("torch.ddp", text=_SPARSE, code=2)
    assert "expected worlds of processes, because it has sparse gradients" in refused
    shown = check("torch.ddp", "--world", "processes:2", "-k", "trains or clips or resumes")
    assert "optimizer SGD, the default" in shown
    assert "proven trains as one process does proven resumes from its state" in shown
    assert (
        "left out clips by the norm of the whole: torch's clip_grad_norm_ takes no sparse gradient" in shown
    )


def test_a_wrong_reduction_of_sparse_gradients_is_caught(check: Check) -> None:
    where = ("--world", "processes:2", "-k", "trains")
    assert "gradient '0.weight'" in check("KeepsItsOwnSparseGradients", *where, text=_SPARSE, code=1)


def test_a_count_of_steps_for_an_empty_shard_is_no_fault(check: Check) -> None:
    """Adagrad makes its state at once, and a rank without elements of a parameter has no gradient under FSDP1."""
    adagrad = GOOD.replace(LOSS, with_optimizer("torch.optim.Adagrad(p, lr=0.01)"))
    check("torch.fsdp1", "-k", "trains", text=adagrad)


def test_warnings_of_the_model_are_the_users(check: Check) -> None:
    """Laws of memory need the form of the model, and must not run its code where warnings may be errors."""
    warns = "import warnings\n        warnings.warn('old')\n        return Net()"
    check("torch.fsdp2", "-k", "frees", text=GOOD.replace("return Net()", warns))


_SPARSE_ADAM = with_optimizer("torch.optim.SparseAdam(list(p))")
_STATE_DEFECTS = {
    "set_state_dict makes optimizer state by a step with dense zeros": (
        _SPARSE.replace(", nn.Tanh(), nn.Linear(4, 2)", "").replace(LOSS, _SPARSE_ADAM),
        ("torch.ddp", "--world=processes:2", "-k=resumes"),
    ),
    "moments in a full optimizer state are the second one": (GOOD, ("torch.fsdp1", "-k=starts")),
    "the state of one with two names is not sharded under the second": (
        GOOD.replace("        self.out =", "        self.same = self.normed\n        self.out ="),
        ("torch.fsdp2", "-k=resumes"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", _STATE_DEFECTS)
def test_each_defect_of_saved_state_is_seen(reason: str, check: Check) -> None:
    text, (engine, *options) = _STATE_DEFECTS[reason]
    assert reason in check(engine, *options, text=text, code=1)


_ROUTED = """
import torch
from torch import nn

class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x

class Mine:
    units = UNITS
    def build(self):
        return nn.Sequential(Routed(), Routed(), nn.Linear(6, 2))
    def batch(self, generator):
        return torch.randn(3, 6, generator=generator)
    def loss(self, output, batch):
        return output.square().mean()
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""


@pytest.mark.parametrize(
    ("units", "engine", "verdict"),
    [
        ("('0.experts.*', '1.experts.*')", "torch.ddp", "proven"),
        ("('0.experts.*', '1.experts.*')", "torch.fsdp2", "not declared"),
        ("('0', '1')", "torch.fsdp2", "proven"),
    ],
)
def test_experts_without_tokens_on_a_rank_are_judged(
    units: str, engine: str, verdict: str, check: Check
) -> None:
    """An engine that gathers each unit in its forward needs all ranks to call it; one that only reduces does not."""
    is_proven = verdict == "proven"
    shown = check(engine, "-k", "trains", text=_ROUTED.replace("UNITS", units), code=0 if is_proven else 1)
    assert f"{verdict} trains as one process does" in shown
    assert ("RANK_DEPENDENT_UNITS" in shown) == ("experts" in units)
    assert ("NOT PROVEN cannot train it, because ranks skip different units" in shown) != is_proven


def test_a_model_that_an_engine_cannot_train_fails_the_users_test(file: Path) -> None:
    """Nothing was judged: the engine refused every plan, because ranks call different experts."""
    file.write_text(_ROUTED.replace("UNITS", "('0.experts.*', '1.experts.*')"))
    with pytest.raises(AssertionError, match=r"(?s)it is not proven.* NOT PROVEN .* make the module around"):
        check(f"{file}:Mine", engine="torch.fsdp2", keyword="trains")
    plugins = ("-p", "shardproof.harness.runner.plugin", "-p", "no:cacheprovider")
    chosen = (
        "--pyargs",
        "shardproof.suites.user_model",
        "--engine",
        "torch.fsdp2",
        "--model",
        f"{file}:Mine",
    )
    done = python("-m", "pytest", *plugins, *chosen, "-k", "trains", cwd=file.parent)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "NOT PROVEN: torch.fsdp2 in threads:2: cannot train it, because ranks" in done.stdout


_UNUSED = GOOD.replace("        self.out =", "        self.spare = nn.Linear(3, 3)\n        self.out =")


def test_the_call_that_was_judged_is_shown_beside_the_default(file: Path, check: Check) -> None:
    """A model with an unused part is trained only with an option, which users do not set by default."""
    shown = check("torch.ddp", "-k", "trains", text=_UNUSED)
    assert "wrapped by DistributedDataParallel(model, find_unused_parameters=True) by default " in shown
    assert "by default DistributedDataParallel(model): CRASHED: rank" in shown
    assert "Expected to have finished reduction in the prior iteration" in shown
    page = (file.parent / "run" / "report.html").read_text()
    assert "wrapped by    DistributedDataParallel(model, find_unused_parameters=True)" in page
    assert "an engine that lets parameters have no gradient in a step (UNUSED)" in page


_WRAPS = """
from torch.nn.parallel import DistributedDataParallel as DDP
def plain(model):
    return DDP(model)
def finding(model, mesh):
    return DDP(model, process_group=mesh.get_group(), find_unused_parameters=True)
"""


@pytest.mark.parametrize(
    ("options", "code", "call"),
    [
        (("--with", "find_unused_parameters=False"), 1, "DistributedDataParallel(model)"),
        (("--wrap", "plain"), 1, "DistributedDataParallel(model)"),
        (("--wrap", "finding"), 0, "DistributedDataParallel(model, find_unused_parameters=True)"),
    ],
)
def test_a_users_own_call_is_judged(options: tuple[str, str], code: int, call: str, check: Check) -> None:
    wraps = check.file.with_name("wraps.py")
    wraps.write_text(_WRAPS)
    flag, value = options
    chosen = (flag, f"{wraps}:{value}" if flag == "--wrap" else value)
    assert f"wrapped by {call} " in check("torch.ddp", "-k", "trains", *chosen, text=_UNUSED, code=code)


_TEACHER = """
import copy
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.head = nn.Linear(6, 4), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.center = nn.Parameter(torch.zeros(4), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                slow.data.lerp_(fast.data, 0.1)
            aim = self.teacher(x) - self.center
            self.center.data.lerp_(aim.mean(0), 0.5)
        return (self.head(self.student(x)) - aim).square().mean()

class Mine:
    def build(self):
        return Net()
    def batch(self, generator):
        return torch.randn(4, 6, generator=generator)
    def loss(self, output, batch):
        return output
    def optimizer(self, params):
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9)
"""


_FORGETS_THE_TEACHER = """
import torch
from shardproof import PreparedModel
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp

class Forgets(PreparedDdp):
    def __call__(self, *inputs, **named):
        kept = self.named.center.detach().clone()
        output = super().__call__(*inputs, **named)
        with torch.no_grad():
            self.named.center.copy_(kept)
        return output

class Mine(DistributedDataParallelEngine):
    name = "mine"
    prepared_type = Forgets
"""


def test_frozen_parameters_that_forward_writes_are_each_ranks_own(check: Check) -> None:
    """A teacher averages its student, and a center the data: once for each forward of its rank."""
    shown = check("torch.ddp", "-k", "trains or microbatches or resumes or evaluates", text=_TEACHER)
    assert "written center, teacher.weight, teacher.bias: forward changes them" in shown
    engine = check.file.with_name("engine.py")
    engine.write_text(_FORGETS_THE_TEACHER)
    check(f"{engine}:Mine", "-k", "trains", code=1)


def test_an_expert_without_a_token_voids_nothing(file: Path, check: Check) -> None:
    """The study sees more steps than the case: expert 3 gets its first token after them."""
    late = "first if len(x) < 4 else nn.functional.silu(self.late(x))"
    file.write_text(
        GOOD.replace("        self.out =", "        self.late = nn.Linear(6, 6)\n        self.out =")
        .replace("hidden = self.normed(x)", f"first = self.normed(x)\n        hidden = {late}")
        .replace("hidden - hidden.mean(0, keepdim=True)", "hidden")
        .replace("torch.randn(4, 6", "torch.randn(3 + (generator.initial_seed() == LATE), 6")
        + f"\nLATE = {microbatch_seed(20_011, step=2, microbatch=0, rank=3)}\n"
    )
    shown = check("torch.ddp", "-k", "trains")
    assert "proven trains as one process does" in shown
    assert "not proven what no loss reached, as experts without a token: late.weight, late.bias;" in shown


_FUSED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 2)
    def forward(self, x):
        x = self.first(x)
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])

class Mine:
    def build(self):
        return Net()
    def batch(self, generator):
        return torch.randn(4, 5, 6, generator=generator)
    def loss(self, output, batch):
        return (output - batch[..., :2]).square().mean()
    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-3)
"""


@pytest.mark.parametrize("engine", ["torch.ddp", "torch.fsdp2"])
def test_elements_without_a_gradient_do_not_hide_their_neighbours(engine: str, check: Check) -> None:
    """Adam makes steps of the rounding in a key's bias, which attention keeps in one tensor with the query's."""
    shown = check(engine, "-k", "trains or shards", text=_FUSED)
    assert "proven trains as one process does" in shown
    assert "weak" not in shown


@pytest.mark.parametrize("mode", ["", ".out.eval()"])
def test_an_evaluation_between_steps_is_judged(mode: str, check: Check) -> None:
    """An engine that stops synchronising after one is wrong, and parts in evaluation mode stay in it."""
    engine = f"{Path(__file__).with_name('planted_bugs.py')}:StopsAfterEvaluation"
    text = GOOD.replace("return Net()", f"net = Net()\n        net{mode}\n        return net")
    shown = check(engine, "-k", "trains or evaluates", text=text, code=1)
    assert "proven trains as one process does" in shown
    assert "FAILED evaluates and drops forwards between steps: matches the oracle" in shown
    assert "only this rank's own gradient: not synchronised" in shown


@pytest.mark.parametrize("engine", ["torch.ddp", "torch.fsdp1", "torch.fsdp2", "reference"])
def test_right_engines_train_around_evaluations(engine: str, check: Check) -> None:
    check(engine, "-k", "evaluates")


def test_a_model_without_a_loss_in_evaluation_is_not_evaluated(check: Check) -> None:
    shown = check(
        "torch.ddp",
        "-k",
        "evaluates or clips",
        text=GOOD.replace(
            "        return {", "        return self.out(hidden) if not self.training else {", 1
        ),
    )
    assert "left out evaluates and drops forwards between steps: in evaluation mode it raises" in shown


_NARROW = """
import torch
from torch import nn

class Mine:
    def build(self):
        layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        return nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64)).bfloat16()
    def batch(self, generator):
        return torch.randint(64, (4, 8), generator=generator)
    def loss(self, output, batch):
        return nn.functional.cross_entropy(output.float().flatten(0, 1), batch.flatten())
"""


@pytest.mark.parametrize("engine", ["torch.fsdp2", "reference"])
def test_a_pass_that_would_have_missed_much_is_weak(engine: str, check: Check) -> None:
    """A parameter of bfloat16 moves by few of its roundings, and a norm has few bits where it is added up in them."""
    shown = check(engine, "-k", "trains or clips", text=_NARROW)
    assert re.search(
        r"weak trains as one process does: an error of [\d.]+% in the (update|gradient) of '", shown
    )
    assert "to see less build the model in float32" in shown
    assert "Conforming: 2 of 2 declared passed (100.0%), in" in shown


@pytest.mark.parametrize("engine", ["torch.fsdp2", "reference"])
def test_what_follows_from_a_norm_of_few_bits_may_differ_as_it_does(engine: str, check: Check) -> None:
    """All gradients depend on its last bit: engines add norms of shards up, and the reference does in float32."""
    two = re.sub(r" +layers = .*\n", "", _NARROW).replace("(64, (4, 8)", "(64, (4, 64)")
    two = two.replace(
        "nn.Embedding(64, 32), *layers, nn.Linear(32, 64)", "nn.Embedding(64, 64), nn.Linear(64, 64)"
    )
    assert "Conforming: 1 of 1 declared passed (100.0%), in" in check(engine, "-k", "clips", text=two)


_ATTENTION = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(self, rows):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(rows)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return rows + self.out(mixed.transpose(1, 2).flatten(2))

class Mine:
    def build(self):
        return nn.Sequential(nn.Embedding(64, 32), Attention(), nn.Linear(32, 64)).bfloat16()
    def batch(self, generator):
        return torch.randint(64, (4, 24), generator=generator)
    def loss(self, output, batch):
        return nn.functional.cross_entropy(output.float().flatten(0, 1), batch.flatten())
    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=3e-3, betas=(0.9, 0.95))
"""


def test_attention_of_few_bits_is_proven(check: Check) -> None:
    """A key's bias has no gradient but rounding, by which Adam steps; a norm's ones move by one step of their dtype."""
    assert "Conforming: 1 of 1 declared passed (100.0%)" in check(
        "reference", "-k", "trains", text=_ATTENTION
    )


def test_an_engine_is_not_blamed_for_state_that_its_optimizer_recasts(check: Check) -> None:
    adam = "    def optimizer(self, parameters):\n        return torch.optim.NAdam(parameters)\n"
    shown = check("torch.ddp", "-k", "trains or resumes", text=_NARROW + adam)
    assert "load_state_dict() of NAdam makes 'mu_product' torch.bfloat16, which was torch.float32" in shown
    assert "Conforming: 1 of 1 declared passed (100.0%)" in shown


_ORTHOGONAL = """
import torch
from torch import nn

class Mine:
    def build(self):
        first = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))
    def batch(self, generator):
        return torch.randn(4, 8, generator=generator)
    def loss(self, output, batch):
        return output.square().mean()
"""


def test_gradients_of_scaled_losses_may_round_otherwise(check: Check) -> None:
    """The exponential of a matrix squares the more often the larger a gradient is, and rounds each time."""
    shown = check("torch.ddp", "-k", "scales", text=_ORTHOGONAL)
    assert "proven scales losses and unscales gradients" in shown


def test_an_optimizer_may_communicate_in_its_step(check: Check) -> None:
    """Muon orthogonalises whole matrices, and DTensor adds up the norms of their shards."""
    matrices = _ORTHOGONAL.replace(
        "nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))", "nn.Linear(8, 6, bias=False)"
    )
    matrices = matrices.replace("nn.Linear(8, 2)", "nn.Linear(6, 4, bias=False)")
    matrices = matrices.replace(LOSS, with_optimizer("torch.optim.Muon(p, lr=0.01)"))
    assert "Conforming: 1 of 1" in check("torch.fsdp2", "-k", "each_unit", text=matrices)


@pytest.mark.parametrize("body", ["self.seen = x.detach().clone()", "self.n = getattr(self, 'n', 0) + 1"])
def test_what_a_model_keeps_for_itself_is_none_of_the_engines(body: str, check: Check) -> None:
    """A tensor is memory of the model's; a number is in no state, and restarts with a fresh model."""
    keeping = GOOD.replace(
        "    def forward(self, x, *, scale):\n", f"    def forward(self, x, *, scale):\n        {body}\n"
    )
    keeping = keeping.replace('scale["of"]', 'scale["of"] / getattr(self, "n", 1)')
    shown = check("torch.fsdp2", "-k", "shards or resumes", text=keeping)
    assert ("resumes from its state: forward changes something" in shown) == ("self.n" in body)


def test_weights_that_forward_computes_are_judged(check: Check) -> None:
    """Torch copies no such tensor, and it is memory of the model's."""
    pruned = GOOD.replace("import torch\n", "import torch\nimport torch.nn.utils.prune\n", 1)
    pruned = pruned.replace("nn.Linear(6, 2)", "nn.utils.prune.l1_unstructured(nn.Linear(6, 2), 'weight', 4)")
    shown = check("torch.fsdp2", "-k", "trains or test_shards", "--world", "threads:3", text=pruned)
    assert "Conforming: 2 of 2 declared passed (100.0%)" in shown


def test_memory_of_a_parameter_need_not_be_in_the_order_of_its_elements(check: Check) -> None:
    """As that of convolutions in channels-last; FSDP2 refuses it."""
    layer = "self.out = nn.Linear(6, 2)"
    strided = f"{layer}\n        self.out.weight.data = self.out.weight.data.t().contiguous().t()"
    shown = check("reference.zero2", "-k", "trains", text=GOOD.replace(layer, strided))
    assert "proven trains as one process does" in shown


@pytest.mark.parametrize("engine", ["torch.fsdp2", "reference"])
def test_ranks_without_a_row_hold_nothing(engine: str, check: Check) -> None:
    """One rank has all of a model whose tensors cannot be divided by rows, and divides by rows still."""
    layers = "nn.Sequential(nn.Linear(32, 1), nn.Unflatten(1, (1, 1)), nn.Conv1d(1, 1, 1), nn.Flatten())"
    one_row = re.sub(r"nn.Sequential\(nn.Embedding.*", layers, _NARROW).replace(
        "randint(64, (4, 8)", "rand((4, 32)"
    )
    one_row = re.sub(r"return nn.functional.*", "return output.square().mean()", one_row)
    assert "proven trains as one process does" in check(engine, "-k", "trains", text=one_row)


def test_a_line_for_each_case_shows_the_remaining_time(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", "torch.ddp", "-k", "trains or clips", "--out", str(file.with_name("run"))]
    assert main(["check", f"{file}:Mine", *options]) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).count("a case that takes longer than") == 1
    assert re.search(r"1 of 2  PASSED in .* s; about \d+ s left: trains as\s+one process does\n", shown)
    assert re.search(r"2 of 2  PASSED in .* s: clips by the norm of the whole\n", shown)
    lines = (line for line in shown.splitlines() if str(file.parent) not in line)  # paths stay whole
    assert max(map(len, lines)) <= 80
