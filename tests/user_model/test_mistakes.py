"""A model, a command or a call that cannot be judged is refused in one sentence, before an engine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.harness.cli.check_in_tests import check
from shardproof.harness.cli.main import main
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.user_model.read import read_model
from tests.shell import python
from tests.user_model.models import GOOD, LOSS, Check, with_optimizer


def test_a_class_that_no_other_process_finds_is_refused() -> None:
    class Inner:
        """Defined inside a function."""

    with pytest.raises(UsageError, match="moving it to the top of the file"):
        check(Inner, engine="torch.ddp")


@pytest.mark.parametrize(
    ("asked", "refused"), [("", True), ("backend='eager'", False), ("disable=True", False)]
)
def test_threads_are_refused_for_a_model_that_inductor_compiles(
    file: Path, asked: str, refused: bool, check: Check
) -> None:
    file.write_text(
        GOOD.replace("return Net()", f"net = Net()\n        net.compile({asked})\n        return net")
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert bool(model.facts.unthreaded) == refused
    if refused:
        worlds = ("--world", "processes:2", "--world", "threads:3")
        shown = check("torch.ddp", *worlds, code=2)
        assert "expected worlds of processes, because inductor compiles it" in shown
        assert "got threads:3; try --world processes:3" in shown


@pytest.mark.parametrize("module", ["random", "numpy.random"])
def test_threads_are_refused_for_a_model_that_seeds_a_generator_that_they_share(
    module: str, check: Check
) -> None:
    """One thread seeds it while another one draws: `BigBird` does so with NumPy's."""
    head = "    def forward(self, x, *, scale):\n"
    seeded = f"{head}        {module}.seed(3)\n        x = x * {module}.random()\n"
    text = f"import {module}\n" + GOOD.replace(head, seeded)
    shown = check("torch.ddp", "-k", "trains", text=text, code=2)
    assert f"because it draws from the generator of {module}, which threads share" in shown
    check("torch.ddp", "-k", "trains", "--world", "processes:2")


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
def test_a_mistake_in_a_users_own_call_is_told(option: str, words: str, check: Check) -> None:
    assert words in check("torch.ddp", "-k", "trains", option, code=2)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"blocks.*"', '"block.*"', "unit 'block.*' matches no submodule with parameters; there are blocks"),
        ('"blocks.*"', '"blocks"', "unit 'blocks' is a ModuleList, which is not called"),
        ('("blocks.*",)', "(3,)", "units (3,), which are not patterns"),
        ("generator=generator", "generator=torch.Generator()", "equal data for two ranks"),
        (
            "torch.randn(4, 6, generator=generator)",
            "torch.tensor([[__import__('random').random()] * 6] * 4)",
            "batch() returned other data in a second call",
        ),
        (
            "hidden = self.normed(x)",
            # Other factors, for sure: two random ones may be alike.
            "hidden = self.normed(x) * next(vars(Net).get('calls') or setattr(Net, 'calls', iter(range(1, 99))) "
            "or Net.calls)",
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
        ("return Net()", "raise KeyError('weights')", "build() raised KeyError: 'weights' (mine.py:"),
        ("return Net()", "raise RuntimeError('No CUDA GPUs')", "leave .cuda() and devices out"),
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
            LOSS,
            with_optimizer("torch.optim.LBFGS(list(p))"),
            "LBFGS, whose step() evaluates the model by a closure",
        ),
        (
            LOSS,
            with_optimizer("torch.optim.SGD([nn.Parameter(torch.ones(1))])"),
            "updates no parameter of the model",
        ),
        (LOSS, f"    def scheduler(self, o):\n        pass\n{LOSS}", "scheduler() without optimizer()"),
        (LOSS, with_optimizer("None"), "optimizer() returned a NoneType, not a torch.optim.Optimizer"),
        (LOSS, with_optimizer("None").replace("optimizer", "optimiser"), "did you mean 'optimizer'?"),
        (
            LOSS,
            with_optimizer("torch.optim.SGD(p, lr=0.0)"),
            "SGD with a learning rate of 0 in all of the first 3 steps",
        ),
        ("units =", "unit =", "Mine.unit is read by nothing; did you mean 'units'?"),
        (
            "        return Net()",
            "        net = Net()\n        net.out.register_forward_hook(lambda m, x, y: y @ torch.eye(2))\n"
            "        return net\n    float64 = True",
            "in float64, which it asks for, ",
        ),
    ],
)
def test_a_mistake_is_refused_in_a_sentence(file: Path, old: str, new: str, words: str, check: Check) -> None:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Mine", limit_s=60)
    assert words in str(caught.value)
    assert words in check("torch.ddp", "--engine", "torch.fsdp2", code=2)


def test_a_rate_that_warms_up_from_zero_is_no_mistake(file: Path) -> None:
    schedule = (
        "    def scheduler(self, o):\n        return torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 4)\n"
    )
    file.write_text(GOOD.replace(LOSS, schedule + with_optimizer("torch.optim.SGD(p, lr=0.5)")))
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


@pytest.mark.parametrize("adder", ["parser", "parser.getgroup('own')"])
@pytest.mark.parametrize("loads", [(), ("-p", "shardproof.harness.runner.plugin")])
def test_a_conftest_keeps_an_option_of_the_name_of_ours(
    file: Path, adder: str, loads: tuple[str, ...]
) -> None:
    """A repository's own tests may have an --engine; ours then has its long name alone."""
    plugins = "" if loads else 'pytest_plugins = ["shardproof.harness.runner.plugin"]\n'
    file.with_name("conftest.py").write_text(
        f"{plugins}def pytest_addoption(parser):\n    {adder}.addoption('--engine', default='none')\n"
    )
    file.with_name("test_ours.py").write_text(
        "def test_both(pytestconfig):\n"
        "    assert pytestconfig.getoption('--engine') == pytestconfig.option.engine == 'mine'\n"
        "    assert pytestconfig.getoption('--shardproof-engine') == ['torch.ddp']\n"
        "    assert pytestconfig.getoption('--world') == ['threads:2']\n"
    )
    engines = ("--engine=mine", "--shardproof-engine=torch.ddp", "--world=threads:2")
    done = python("-m", "pytest", *loads, *engines, "--rootdir", str(file.parent), str(file.parent))
    assert "1 passed" in done.stdout, done.stdout + done.stderr
