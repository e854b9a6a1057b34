"""`shardproof check` judges a user's model, detects wrong engines, and refuses mistakes in one sentence."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardproof.engine.capability import Capability
from shardproof.engine.registry import shipped_mutants
from shardproof.fixtures.optimizers import ADAMW, COARSE_ADAMW
from shardproof.fixtures.own_model import OWN_MODEL
from shardproof.harness.cases.batch import ModelBatch, arguments_of, converted, microbatch_seed, tensors_of
from shardproof.harness.cases.units import matching_units
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.cli.check import check
from shardproof.harness.cli.commands import deadline_for
from shardproof.harness.cli.main import main
from shardproof.harness.errors import UsageError
from shardproof.harness.runner import user_models
from shardproof.harness.runner.model_summary import model_summary
from shardproof.harness.runner.user_models import read_model
from shardproof.suites.own_model.conftest import default_optimizer

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.normed = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x, *, scale):
        for block in self.blocks:
            x = torch.tanh(block(x)) * scale["of"]
        hidden = self.normed(x)
        return {"y": self.out(hidden - hidden.mean(0, keepdim=True))}

class Mine:
    units = ("blocks.*",)
    def build(self):
        return Net()
    def batch(self, generator):
        return {"x": torch.randn(4, 6, generator=generator), "scale": {"of": 0.5}}
    def loss(self, output, batch):
        return (output["y"] - batch["x"][:, :2]).square().mean()
"""


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
_LOSS = "    def loss("


def _optimizer(text: str) -> str:
    return f"    def optimizer(self, p):\n        return {text}\n{_LOSS}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file


def _check(file: Path, engine: str, *options: str) -> int:
    out = str(file.parent / "run")
    return main(["check", f"{file}:Mine", "--engine", engine, "--out", out, *options])


def test_a_right_engine_is_proven(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(file, "torch.fsdp2", "-k", "trains or frees") == 0
    shown = capsys.readouterr().out
    assert "proven        trains as one process does\n" in shown
    assert "proven        frees shards after forward\n" in shown
    assert "not proven    order of streams and lifetimes of memory (--thorough)" in shown
    assert all(
        len(line) <= 100 for line in shown[shown.rindex("torch.fsdp2 in") : shown.index("wrote")].splitlines()
    )
    precise = {
        m[2]: float(m[1]) for m in re.finditer(r"error of ([0-9.e-]+)% of any (gradient|update)", shown)
    }
    assert 0 < precise["gradient"] < 1
    assert 0 < precise["update"] < 10


def test_a_case_that_does_not_apply_is_listed_with_the_reason(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(GOOD.replace("for block in self.blocks:", "for block in (*self.blocks, self.blocks[0]):"))
    assert (
        _check(file, "torch.fsdp2", "-k", "each_unit_once or two_replicas or clips", "--world", "threads:3")
        == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out gathers and reduces each unit once: its unit 'blocks.0' is called 2 times" in shown
    assert "left out shards two replicas: needs two replicas of equal size" in shown


def test_a_computation_in_bfloat16_is_proven_however_it_rounds(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(file, "torch.fsdp2", "-k", "bfloat16") == 0
    assert "proven        computes in bfloat16" in capsys.readouterr().out


def test_buffers_keep_their_dtype_where_parameters_compute_in_bfloat16(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines do not cast tables of rotations; models cast them where they use them."""
    buffered = GOOD.replace(
        "        self.out =",
        "        self.register_buffer('table', torch.linspace(0.9, 1.1, 6))\n        self.out =",
    ).replace("hidden = self.normed(x)", "hidden = self.normed(x * self.table.to(x.dtype))")
    file.write_text(buffered)
    assert _check(file, "torch.fsdp2", "-k", "bfloat16") == 0
    assert "proven        computes in bfloat16" in capsys.readouterr().out


def test_a_computation_in_bfloat16_need_not_move_a_parameter_with_a_small_gradient(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain descent changes ones by less than a rounding in the norms of a query's low rank, in models of experts."""
    gain = "self.gain = nn.Parameter(torch.ones(6))\n        self.out ="
    file.write_text(
        GOOD.replace("self.out =", gain, 1).replace("tanh(block(x))", "tanh(block(x + 1e-5 * self.gain))")
    )
    assert "gain" in read_model(f"{file}:Mine", limit_s=60)[0].facts.slow
    assert _check(file, "torch.fsdp2", "-k", "bfloat16") == 0
    assert "proven        computes in bfloat16" in capsys.readouterr().out


def test_a_model_of_bfloat16_is_trained_in_larger_steps(file: Path) -> None:
    """The weight of a norm, which is 1, would move by one rounding at most."""
    assert default_optimizer(read_model(f"{file}:Mine", limit_s=60)[0]) == ADAMW
    file.write_text(
        GOOD.replace("return Net()", "return Net().bfloat16()").replace(
            "r=generator)", "r=generator).bfloat16()"
        )
    )
    assert default_optimizer(read_model(f"{file}:Mine", limit_s=60)[0]) == COARSE_ADAMW


def test_a_model_that_computes_in_no_bfloat16_is_left_out(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer of float32 promotes the activations, which the next layer then refuses."""
    buffered = GOOD.replace(
        "        self.out =",
        "        self.register_buffer('table', torch.linspace(0.9, 1.1, 6))\n        self.out =",
    ).replace("hidden = self.normed(x)", "hidden = self.normed(x * self.table)")
    file.write_text(buffered)
    assert _check(file, "torch.fsdp2", "-k", "bfloat16 or trains") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out computes in bfloat16 and reduces in float32: it raises RuntimeError in bfloat16" in shown


def test_a_wrong_engine_is_caught_with_its_cause(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = next(m.engine_spec for m in shipped_mutants() if m.name == "SumsInsteadOfAveraging")
    assert _check(file, engine, "-k", "trains") == 1
    shown = capsys.readouterr().out
    assert "exactly 2 x the reference" in " ".join(shown.split())
    assert "shardproof check" in shown


def test_a_class_that_no_other_process_finds_is_refused() -> None:
    class Inner:
        """Defined inside a function."""

    with pytest.raises(UsageError, match="moving it to the top of the file"):
        check(Inner, engine="torch.ddp")


def test_a_model_is_read(file: Path) -> None:
    model, optimizer = read_model(f"{file}:Mine", limit_s=60)
    assert (model.name, model.units) == ("Mine", ("blocks.0", "blocks.1"))
    # A bias before its mean is taken off has a gradient that is zero but for rounding.
    assert model.idle == ("normed.bias",)
    assert optimizer is None
    assert not model.demands


@pytest.mark.parametrize(
    ("engine", "code"),
    [("torch.fsdp2", 0), ("LosesStateInAnotherWorld", 1), ("AlignsStateForTheWorldBefore", 1)],
)
def test_a_start_is_judged_however_noisy_the_steps_before_were(
    file: Path, engine: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under autocast the noise hides a wrong factor of a gradient, but not a parameter that was not loaded."""
    file.write_text(_AUTOCAST)
    spec = next((m.engine_spec for m in shipped_mutants() if m.name == engine), engine)
    assert _check(file, spec, "-k", "starts") == code
    shown = capsys.readouterr().out
    assert ("proven        starts from what other ranks saved" in shown) == (code == 0)
    assert "an error of" not in shown


def test_a_schedule_follows_the_optimizer_and_is_resumed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = "    def scheduler(self, o):\n        return torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.25**n)\n"
    text = GOOD.replace(_LOSS, schedule + _optimizer("torch.optim.SGD(p, lr=0.5, momentum=0.9)"))
    file.write_text(text)
    assert _check(file, "torch.fsdp2", "-k", "trains or resumes") == 0
    shown = capsys.readouterr().out
    assert shown.count("\n  proven ") == 2


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_compiled_model_is_judged(file: Path, world: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1 gathers inside the compiled forward: the harness there must not be compiled too."""
    whole = "net = Net()\n        net.compile(backend='eager')\n        return net"
    file.write_text(GOOD.replace("return Net()", whole))
    assert _check(file, "torch.fsdp1", "-k", "trains", "--world", world) == 0
    assert "proven" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "refused"), [("", True), ("backend='eager'", False), ("disable=True", False)]
)
def test_threads_are_refused_for_a_model_that_inductor_compiles(
    file: Path, asked: str, refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(
        GOOD.replace("return Net()", f"net = Net()\n        net.compile({asked})\n        return net")
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.is_compiled == refused
    if refused:
        worlds = ("--world", "processes:2", "--world", "threads:3")
        assert _check(file, "torch.ddp", *worlds) == 2
        shown = capsys.readouterr().err
        assert "expected worlds of processes, because inductor compiles it" in shown
        assert "got threads:3; try --world processes:3" in shown


def test_a_fresh_model_has_no_gradients_of_parameters_outside_the_optimizer(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No call clears these gradients, so they add up until the state is loaded into another model."""
    some = "torch.optim.SGD([q for q in p if q.ndim == 2], lr=0.1, momentum=0.9)"
    file.write_text(GOOD.replace(_LOSS, _optimizer(some)))
    assert _check(file, "torch.ddp", "-k", "resumes or starts") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "proven resumes from its state proven starts from what other ranks saved" in shown


def test_sparse_gradients_are_judged_where_ranks_are_processes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(_SPARSE)
    assert _check(file, "torch.ddp") == 2
    assert "expected worlds of processes, because it has sparse gradients" in capsys.readouterr().err
    assert _check(file, "torch.ddp", "--world", "processes:2", "-k", "trains or clips or resumes") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "optimizer SGD, the default" in shown
    assert "proven trains as one process does proven resumes from its state" in shown
    assert (
        "left out clips by the norm of the whole: torch's clip_grad_norm_ takes no sparse gradient" in shown
    )


def test_a_wrong_reduction_of_sparse_gradients_is_caught(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(_SPARSE)
    engine = next(m.engine_spec for m in shipped_mutants() if m.name == "KeepsItsOwnSparseGradients")
    assert _check(file, engine, "--world", "processes:2", "-k", "trains") == 1
    assert "gradient '0.weight'" in capsys.readouterr().out


def test_a_count_of_steps_for_an_empty_shard_is_no_fault(file: Path) -> None:
    """Adagrad makes its state at once, and a rank without elements of a parameter has no gradient under FSDP1."""
    file.write_text(GOOD.replace(_LOSS, _optimizer("torch.optim.Adagrad(p, lr=0.01)")))
    assert _check(file, "torch.fsdp1", "-k", "trains") == 0


def test_warnings_of_the_model_are_the_users(file: Path) -> None:
    """Laws of memory need the form of the model, and must not run its code where warnings may be errors."""
    file.write_text(
        GOOD.replace("return Net()", "import warnings\n        warnings.warn('old')\n        return Net()")
    )
    assert _check(file, "torch.fsdp2", "-k", "frees") == 0


def test_a_string_is_one_pattern(file: Path) -> None:
    file.write_text(GOOD.replace('("blocks.*",)', '"blocks.*"'))
    assert read_model(f"{file}:Mine", limit_s=60)[0].units == ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("part", "evaluating", "shown"),
    [
        ("net.out", ("out",), "evaluation    out, as build() returned them"),
        ("net", ("",), "evaluation    the whole model, as build() returned it"),
    ],
)
def test_the_mode_of_a_built_model_is_kept_and_shown(
    file: Path, part: str, evaluating: tuple[str, ...], shown: str
) -> None:
    """Some users train in evaluation mode to keep running statistics; loaded models are in it by default."""
    file.write_text(GOOD.replace("return Net()", f"net = Net()\n        {part}.eval()\n        return net"))
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.evaluating == evaluating
    assert not any(model.build().get_submodule(name).training for name in evaluating)
    assert shown in model_summary(model, None, pass_s=1.0, limit_s=60.0)


_ROUTED = """
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
    file: Path, units: str, engine: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that gathers each unit in its forward needs all ranks to call it; one that only reduces does not."""
    file.write_text("import torch\nfrom torch import nn\n" + _ROUTED.replace("UNITS", units))
    is_proven = verdict == "proven"
    assert _check(file, engine, "-k", "trains") == (0 if is_proven else 1)
    shown = capsys.readouterr().out
    assert f"{verdict:<14}trains as one process does" in shown
    assert ("RANK_DEPENDENT_UNITS" in shown) == ("experts" in units)
    assert ("NOT PROVEN    cannot train it, because ranks skip different units" in shown) != is_proven


def test_a_model_that_an_engine_cannot_train_fails_the_users_test(file: Path) -> None:
    """Nothing was judged: the engine refused every plan, because ranks call different experts."""
    units = "('0.experts.*', '1.experts.*')"
    file.write_text("import torch\nfrom torch import nn\n" + _ROUTED.replace("UNITS", units))
    with pytest.raises(AssertionError, match=r"(?s)it is not proven.* NOT PROVEN .* make the module around"):
        check(f"{file}:Mine", engine="torch.fsdp2", keyword="trains")
    session = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "shardproof.harness.runner.plugin",
        "-p",
        "no:cacheprovider",
    ]
    chosen = ["--pyargs", "shardproof.suites.own_model", "--engine", "torch.fsdp2", "--model", f"{file}:Mine"]
    done = subprocess.run(
        [*session, *chosen, "-k", "trains"], cwd=file.parent, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "NOT PROVEN: torch.fsdp2 in threads:2: cannot train it, because ranks" in done.stdout


_UNUSED = GOOD.replace("        self.out =", "        self.spare = nn.Linear(3, 3)\n        self.out =")
_WRAPS = """
from torch.nn.parallel import DistributedDataParallel as DDP
def plain(model):
    return DDP(model)
def finding(model, mesh):
    return DDP(model, process_group=mesh.get_group(), find_unused_parameters=True)
"""


def test_the_call_that_was_judged_is_shown_beside_the_default(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with an unused part is trained only with an option, which users do not set by default."""
    file.write_text(_UNUSED)
    assert _check(file, "torch.ddp", "-k", "trains") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "wrapped by DistributedDataParallel(model, find_unused_parameters=True) by default " in shown
    assert "by default DistributedDataParallel(model): CRASHED: rank" in shown
    assert "Expected to have finished reduction in the prior iteration" in shown
    page = (file.parent / "run" / "report.html").read_text()
    assert "wrapped by    DistributedDataParallel(model, find_unused_parameters=True)" in page
    assert "an engine that lets parameters have no gradient in a step (UNUSED)" in page


@pytest.mark.parametrize(
    ("options", "code", "call"),
    [
        (("--with", "find_unused_parameters=False"), 1, "DistributedDataParallel(model)"),
        (("--wrap", "plain"), 1, "DistributedDataParallel(model)"),
        (("--wrap", "finding"), 0, "DistributedDataParallel(model, find_unused_parameters=True)"),
    ],
)
def test_a_users_own_call_is_judged(
    file: Path, options: tuple[str, str], code: int, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(_UNUSED)
    wraps = file.with_name("wraps.py")
    wraps.write_text(_WRAPS)
    flag, value = options
    assert (
        _check(file, "torch.ddp", "-k", "trains", flag, f"{wraps}:{value}" if flag == "--wrap" else value)
        == code
    )
    assert f"wrapped by    {call}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--with=find_unused_parameter=True",
            "no option 'find_unused_parameter'; did you mean 'find_unused_parameters'",
        ),
        (
            "--with=static_graph=maybe",
            "--with: expected NAME=VALUE, got static_graph=maybe; try a function of your own",
        ),
        ("--wrap=nowhere.py:wrap", "expected a Python file at"),
    ],
)
def test_a_mistake_in_a_users_own_call_is_told(
    file: Path, option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(file, "torch.ddp", "-k", "trains", option) == 2
    assert words in capsys.readouterr().err


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


def test_frozen_parameters_that_forward_writes_are_each_ranks_own(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher averages its student, and a center the data: once for each forward of its rank."""
    file.write_text(_TEACHER)
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.written == ("center", "teacher.weight", "teacher.bias")
    assert _check(file, "torch.ddp", "-k", "trains or microbatches or resumes or evaluates") == 0
    assert (
        "written       center, teacher.weight, teacher.bias: forward changes them" in capsys.readouterr().out
    )
    engine = file.with_name("engine.py")
    engine.write_text(_FORGETS_THE_TEACHER)
    shutil.rmtree(file.with_name("run"))
    assert _check(file, f"{engine}:Mine", "-k", "trains") == 1


def test_an_expert_without_a_token_voids_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The study sees more steps than the case: expert 3 gets its first token after them."""
    late = "first if len(x) < 4 else nn.functional.silu(self.late(x))"
    file.write_text(
        GOOD.replace("        self.out =", "        self.late = nn.Linear(6, 6)\n        self.out =")
        .replace("hidden = self.normed(x)", f"first = self.normed(x)\n        hidden = {late}")
        .replace("hidden - hidden.mean(0, keepdim=True)", "hidden")
        .replace("torch.randn(4, 6", "torch.randn(3 + (generator.initial_seed() == LATE), 6")
        + f"\nLATE = {microbatch_seed(20_011, step=2, microbatch=0, rank=3)}\n"
    )
    assert _check(file, "torch.ddp", "-k", "trains") == 0
    shown = " ".join(capsys.readouterr().out.split())
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
def test_elements_without_a_gradient_do_not_hide_their_neighbours(
    file: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adam makes steps of the rounding in a key's bias, which attention keeps in one tensor with the query's."""
    file.write_text(_FUSED)
    assert _check(file, engine, "-k", "trains or shards") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "proven trains as one process does" in shown
    assert "weak" not in shown


_STALE_AFTER_EVALUATION = """
from torch.nn.parallel import DistributedDataParallel
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine

class Syncs(DistributedDataParallel):
    def eval(self):
        self.require_backward_grad_sync = False
        return super().eval()

class Mine(DistributedDataParallelEngine):
    name = "mine"
    def prepare(self, model, plan, mesh):
        prepared = super().prepare(model, plan, mesh)
        prepared.module.__class__ = Syncs
        return prepared
"""


@pytest.mark.parametrize("mode", ["", ".out.eval()"])
def test_an_evaluation_between_steps_is_judged(
    file: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that stops synchronising after one is wrong, and parts in evaluation mode stay in it."""
    if mode:
        file.write_text(GOOD.replace("return Net()", f"net = Net()\n        net{mode}\n        return net"))
    engine = file.with_name("engine.py")
    engine.write_text(_STALE_AFTER_EVALUATION)
    assert _check(file, f"{engine}:Mine", "-k", "trains or evaluates") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "proven trains as one process does" in shown
    assert "FAILED evaluates and drops forwards between steps: matches the oracle" in shown


@pytest.mark.parametrize("engine", ["torch.ddp", "torch.fsdp1", "torch.fsdp2", "reference"])
def test_right_engines_train_around_evaluations(file: Path, engine: str) -> None:
    assert _check(file, engine, "-k", "evaluates") == 0


def test_a_model_without_a_loss_in_evaluation_is_not_evaluated(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(
        GOOD.replace("        return {", "        return self.out(hidden) if not self.training else {", 1)
    )
    assert _check(file, "torch.ddp", "-k", "evaluates or clips") == 0
    assert "left out      evaluates and drops forwards between steps: in evaluation mode it raises" in (
        capsys.readouterr().out
    )


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


def test_a_pass_that_would_have_missed_much_is_weak(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter of bfloat16 moves by few of its roundings."""
    file.write_text(_NARROW)
    assert _check(file, "torch.fsdp2", "-k", "trains") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"weak trains as one process does: an error of [\d.]+% in the (update|gradient) of '", shown
    )
    assert "to see less build the model in float32" in shown
    assert "Conforming: 1 of 1 declared cases proven, in" in shown


_BLOCK = """class Block(nn.ModuleDict):
    def __init__(self):
        super().__init__({"in": nn.Linear(6, 6)})
    def forward(self, x):
        return self["in"](x)

class Net"""


def test_parts_called_outside_their_unit_are_named(file: Path) -> None:
    """DiT's model itself calls the embedding of its first block."""
    file.write_text(
        GOOD.replace("block(x)", 'block["in"](block(x))')
        .replace("nn.Linear(6, 6) for", "Block() for")
        .replace("class Net", _BLOCK)
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.outside == ("blocks.0.in", "blocks.1.in")
    assert "called outside the forward of the unit" in model_summary(model, None, pass_s=1.0, limit_s=60.0)


def test_units_that_backward_recomputes_are_counted_once(file: Path) -> None:
    file.write_text(
        GOOD.replace("block(x)", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)").replace(
            "import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1
        )
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert (model.facts.uncounted, model.facts.outside) == ("", ())


_LARS = """
class Scaled(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * p.norm() / p.grad.norm() * p.grad
"""


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        ("torch.optim.AdamW(p, lr=0.01)", False),
        ("torch.optim.SGD([q for q in p if q.ndim], lr=0.01, momentum=0.9)", False),
        ("torch.optim.Adafactor(p, lr=0.01)", True),
        ("torch.optim.Muon([q for q in p if q.ndim == 2])", True),
        ("Scaled(p)", True),
    ],
)
def test_optimizers_that_look_at_whole_parameters_ask_engines_for_them(
    file: Path, optimizer: str, needed: bool
) -> None:
    file.write_text(GOOD.replace(_LOSS, _optimizer(optimizer)) + _LARS)
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert (Capability.PARAMETER_SHAPES in model.demands) == needed


def test_an_edited_file_is_another_problem(file: Path) -> None:
    before, _ = read_model(f"{file}:Mine", limit_s=60)
    file.write_text(GOOD.replace("0.5", "0.25"))
    after, _ = read_model(f"{file}:Mine", limit_s=60)
    assert before != after


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"blocks.*"', '"block.*"', "unit 'block.*' matches no submodule with parameters; there are blocks"),
        ('("blocks.*",)', "(3,)", "units (3,), which are not patterns"),
        ("generator=generator", "generator=torch.Generator()", "equal data for two ranks"),
        (
            "torch.randn(4, 6, generator=generator)",
            "torch.tensor([[__import__('random').random()] * 6] * 4)",
            "batch() returned other data in a second call",
        ),
        (
            "hidden = self.normed(x)",
            "hidden = self.normed(x) * __import__('random').random()",
            "is another one the second time, for equal parameters",
        ),
        (
            "        return Net()",
            "        self.net = getattr(self, 'net', None) or Net()\n        return self.net",
            "build() returned the same parameter 'blocks.0.weight' twice",
        ),
        ("return Net()", "return Net().to('meta')", "not on the CPU: 'blocks.0.weight' is on meta"),
        (".square().mean()", ".square()", "a tensor of shape [4, 2], not one number"),
        (".square().mean()", ".square().mean() * float('nan')", "loss() is nan in step 0"),
        (".square().mean()", ".detach().square().mean()", "without a gradient"),
        ("return Net()", "return None", "build() returned a NoneType, not an nn.Module"),
        ("return Net()", "return nn.ReLU()", "without parameters"),
        ("return Net()", "raise KeyError('weights')", "build() raised KeyError: 'weights'"),
        (
            "return Net()",
            "raise ImportError('no Net') from OSError('no library')",
            "build() raised ImportError: no Net (from OSError: no library)",
        ),
        ("def loss(", "def lost(", "Mine without loss()"),
        ("class Mine", "class Nine", "which does not define it; did you mean 'Nine'?"),
        ("import torch\n", "import torchh\n", "torchh is not installed"),
        (
            '"x": torch.randn',
            '"z": torch.randn',
            "step 0, microbatch 0, rank 0, of shapes [4, 6] raised TypeError",
        ),
        (
            "randn(4, 6,",
            "randn(4, 6 + generator.initial_seed() % 2,",
            "of shapes [4, 7] raised RuntimeError",
        ),
        (
            _LOSS,
            _optimizer("torch.optim.LBFGS(list(p))"),
            "LBFGS, whose step() evaluates the model by a closure",
        ),
        (
            _LOSS,
            _optimizer("torch.optim.SGD([nn.Parameter(torch.ones(1))])"),
            "updates no parameter of the model",
        ),
        (_LOSS, f"    def scheduler(self, o):\n        pass\n{_LOSS}", "scheduler() without optimizer()"),
        (_LOSS, _optimizer("None"), "optimizer() returned a NoneType, not a torch.optim.Optimizer"),
        (
            "        return Net()",
            "        net = Net()\n        net.out.register_forward_hook(lambda m, x, y: y @ torch.eye(2))\n"
            "        return net\n    float64 = True",
            "in float64, which it asks for, ",
        ),
    ],
)
def test_a_mistake_is_refused_in_a_sentence(
    file: Path, old: str, new: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Mine", limit_s=60)
    assert words in str(caught.value)
    assert _check(file, "torch.ddp", "--engine", "torch.fsdp2") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("units =", "unit =", "Mine.unit is read by nothing; did you mean 'units'?"),
        (_LOSS, _optimizer("None").replace("optimizer", "optimiser"), "did you mean 'optimizer'?"),
        (
            _LOSS,
            _optimizer("torch.optim.SGD(p, lr=0.0)"),
            "SGD with a learning rate of 0 in all of the first 3 steps",
        ),
        ("        return Net()", "        raise KeyError('w')", "raised KeyError: 'w' (mine.py:"),
        (
            "        return Net()",
            "        raise RuntimeError('No CUDA GPUs')",
            "leave .cuda() and devices out",
        ),
    ],
)
def test_a_mistake_names_what_to_mend(file: Path, old: str, new: str, words: str) -> None:
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Mine", limit_s=60)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "call"),
    [
        (
            "        return (output",
            "        if torch.distributed.is_initialized():\n"
            "            torch.distributed.all_reduce(torch.ones(1))\n        return (output",
            "all_reduce at mine.py:",
        ),
        (
            "hidden = self.normed(x)",
            "hidden = torch.cat(torch.distributed.nn.functional.all_gather(self.normed(x))) "
            "if torch.distributed.is_initialized() else self.normed(x)",
            "all_gather at mine.py:",
        ),
        ("self.out =", "self.norm, self.out = nn.SyncBatchNorm(2),", "'norm' is a SyncBatchNorm"),
    ],
)
def test_no_engine_is_blamed_for_a_model_that_communicates(file: Path, old: str, new: str, call: str) -> None:
    """As losses of contrast over all ranks do, and means over the tokens of all ranks."""
    file.write_text("import torch.distributed.nn\n" + GOOD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Mine", limit_s=60)
    assert f"communicates: {call}" in str(caught.value)
    assert "no engine is to blame" in str(caught.value)


def test_a_rate_that_warms_up_from_zero_is_no_mistake(file: Path) -> None:
    schedule = (
        "    def scheduler(self, o):\n        return torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 4)\n"
    )
    file.write_text(GOOD.replace(_LOSS, schedule + _optimizer("torch.optim.SGD(p, lr=0.5)")))
    read_model(f"{file}:Mine", limit_s=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "torch.dpd"], "did you mean 'torch.ddp'?"),
        (
            ["--engine", "torch.ddp", "-k", "trans"],
            "expected parts of the names of cases, got 'trans'; try -k trains",
        ),
        (
            ["--engine", "torch.ddp", "--out", "RUN"],
            "expected no run there yet, got run.jsonl; try another --out",
        ),
    ],
)
def test_a_mistake_in_the_command_is_told_before_the_model_is_read(
    file: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = file.with_name("taken")
    taken.mkdir()
    (taken / "run.jsonl").touch()
    file.write_text("raise SystemExit('read')")
    assert main(["check", f"{file}:Mine", *(str(taken) if a == "RUN" else a for a in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_a_loss_that_ignores_the_batch_is_refused(file: Path) -> None:
    blind = GOOD.replace("for block", "x = torch.ones_like(x)\n        for block").replace(
        '- batch["x"][:, :2]', ""
    )
    file.write_text(blind)
    with pytest.raises(UsageError, match=r"does loss\(\) depend on the batch"):
        read_model(f"{file}:Mine", limit_s=60)


def test_batches_may_have_rows_of_their_own_number(file: Path) -> None:
    file.write_text(GOOD.replace("randn(4, 6,", "randn(4 + generator.initial_seed() % 2, 6,"))
    read_model(f"{file}:Mine", limit_s=60)


_BUILT_ALONE = """if not building.acquire(blocking=False):
            raise RuntimeError("two threads build at a time")
        threading.Event().wait(0.5)  # as an import may take
        building.release()
        return Net()"""


def test_rank_threads_build_one_after_the_other(file: Path) -> None:
    """Libraries import their parts on first use, and may fail if two threads do so at once."""
    shared = "import threading\nbuilding = threading.Lock()\n\nclass Mine"
    file.write_text(GOOD.replace("class Mine", shared).replace("return Net()", _BUILT_ALONE))
    problem = UserModel(spec=f"{file}:Mine", name="Mine", digest="", units=())
    with ThreadPoolExecutor(2) as pool:
        built = [pool.submit(problem.build) for _ in range(2)]
    assert all(done.result().training for done in built)


def test_the_first_lines_describe_the_model(file: Path) -> None:
    file.write_text(GOOD.replace(_LOSS, _optimizer("torch.optim.SGD(p, lr=0.1)")))
    model, optimizer = read_model(f"{file}:Mine", limit_s=60)
    demanding = replace(model, demands=frozenset({Capability.UNUSED}), is_widened=False)
    shown = " ".join(model_summary(demanding, optimizer, pass_s=0.5, limit_s=90).split())
    assert (
        "140 elements in 8 parameters, which communicate as 2 units (blocks.0, blocks.1) and the rest"
        in shown
    )
    assert "reference one process, in the model's own dtypes" in shown
    assert "optimizer optimizer() of the model" in shown
    assert "need not move normed.bias" in shown
    assert "needs an engine that lets parameters have no gradient in a step (UNUSED)" in shown
    assert "forward and backward take 0.5 s; a case that takes longer than 90 s counts as hung" in shown


@pytest.mark.parametrize(("factor", "is_zero"), [(1e-5, False), (1e-12, True)])
def test_a_small_gradient_is_distinguished_from_one_that_is_zero_but_for_rounding(
    file: Path, factor: float, is_zero: bool
) -> None:
    text = GOOD.replace("keepdim=True))}", f"keepdim=True)) + {factor} * self.faint}}")
    file.write_text(
        text.replace(
            "        self.out =", "        self.faint = nn.Parameter(torch.ones(2))\n        self.out ="
        )
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert set(model.idle) == {"normed.bias"} | ({"faint"} if is_zero else set())


def test_a_layer_that_one_batch_leaves_out_is_known(file: Path) -> None:
    """The first batches use all layers; the last batch of the second step, computed in float32, leaves one out."""
    text = GOOD.replace("self.normed(x)", "self.normed(x) if x[0, 0] > 0 else x")
    file.write_text(text.replace("hidden - hidden.mean(0, keepdim=True)", "hidden"))
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.seldom == ("normed.bias", "normed.weight")
    assert Capability.RANK_DEPENDENT in model.demands


def test_a_deadline_grows_with_the_model() -> None:
    assert deadline_for(0.001, 2) == 61
    assert deadline_for(2.0, 2) == 60 + 30 * 9 * 2 * 2
    assert deadline_for(2.0, 4) > deadline_for(2.0, 2)


def test_a_line_for_each_case_shows_the_remaining_time(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(file, "torch.ddp", "-k", "trains or clips") == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).count("a case that takes longer than") == 1
    assert re.search(
        r"1 of 2  torch.ddp in threads:2: trains as one process does: PASSED, .* s; about \d+ s left", shown
    )
    assert re.search(r"2 of 2  torch.ddp in threads:2: clips by the norm of the whole: PASSED, .* s\n", shown)


def test_a_pattern_matches_one_part_of_a_name() -> None:
    model = OWN_MODEL.build()
    assert matching_units(model, ["layers.*"]) == OWN_MODEL.units
    assert matching_units(model, ["layers.*.mix", "head"]) == ("layers.0.mix", "layers.1.mix", "head")
    assert matching_units(model, ["layers.*", "layers.*.mix"])[:2] == ("layers.0.mix", "layers.1.mix")
    with pytest.raises(ValueError, match="matches no submodule"):
        matching_units(model, ["*.*.*.*"])


def test_the_model_that_ships_is_described_as_it_is() -> None:
    described, optimizer = read_model(OWN_MODEL.spec, limit_s=60)
    assert described == OWN_MODEL
    assert optimizer is not None


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        ({"x": 1}, (), {"x": 1}),
        ((1, 2), (1, 2), {}),
        ([1, 2], (1, 2), {}),
        (3, (3,), {}),
    ],
)
def test_a_batch_becomes_the_arguments_of_forward(
    given: object, args: tuple[object, ...], kwargs: object
) -> None:
    assert arguments_of(ModelBatch(given=given).inputs) == (args, kwargs)


def test_every_tensor_of_a_tree_is_converted() -> None:
    batch = ModelBatch(
        given={"a": (torch.ones(1), [torch.ones(2), None]), "b": {"c": torch.ones(3)}, "d": "x"}
    )
    doubled = converted(batch, torch.Tensor.double)
    assert [(t.numel(), t.dtype) for t in tensors_of(doubled)] == [(n, torch.float64) for n in (1, 2, 3)]
    assert isinstance(doubled, ModelBatch)
    assert doubled.given["a"][1][1] is None
    assert doubled.given["d"] == "x"


def test_data_and_model_are_the_same_each_time() -> None:
    def numbers(model: UserModel) -> list[torch.Tensor]:
        batch = model.batch(step=1, microbatch=2, rank=3)
        return [*tensors_of(batch), *model.build().parameters()]

    state = torch.get_rng_state()
    first = numbers(OWN_MODEL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(17)
    assert all(torch.equal(a, b) for a, b in zip(first, numbers(OWN_MODEL), strict=True))


def test_the_command_and_the_suite_read_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def noted(spec: str, *, limit_s: float) -> tuple[UserModel, None]:
        read.append(spec)
        return OWN_MODEL, None

    monkeypatch.setattr(user_models, "_known", {})
    monkeypatch.setattr(user_models, "read_model", noted)
    for limit_s in (600.0, 75.0):
        assert user_models.known_model(OWN_MODEL.spec, limit_s) == (OWN_MODEL, None)
    assert read == [OWN_MODEL.spec]
