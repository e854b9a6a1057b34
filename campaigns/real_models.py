"""Models of transformers, timm and other libraries, judged under engines as their users would: `make models`.

``python -m campaigns.real_models`` makes an environment of its own below ``.venvs/``, runs `shardproof check` there
on each class of ``examples/models/``, and by ``--hf`` on configurations whose small sizes it finds itself, and prints
one row a model. What has been run already is not run again; delete its folder below ``conformance/models/`` to have
it run anew.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from campaigns.environments import ENVIRONMENTS, ROOT, environment
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import read_run

MODELS = ROOT / "examples" / "models"
RUNS = ROOT / "conformance" / "models"
# Installed without dependencies, timm and those after it leave torch unchanged: a later torchvision would install
# another torch.
PACKAGES = (
    "transformers==5.24.0 pillow==13.0.0 importlib-metadata==10.2.0 requests==2.34.2",
    "--no-deps timm==1.0.31 torchvision==0.28.0 diffusers==0.42.1 open_clip_torch==3.3.0",
    "ftfy peft==0.21.2 torch-geometric==2.8.1 vector-quantize-pytorch==1.32.0 x-transformers==2.31.10 zuko==1.6.0",
)
# torchvision's wheels on a package registry are built for CUDA. With torch's CPU build their kernels do not load, and
# their import looks up two operators, which no model here calls.
_NAMES = """

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
# Models of transformers that need no file: their classes of configuration, without the last word.
CONFIGURATIONS = [
    "Bloom", "Cohere", "DeiT", "DistilBert", "Electra", "GPT2", "GPTNeoX", "Granite", "Longformer", "Mamba", "OPT",
    "Olmo2", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "Roberta", "Rwkv", "Starcoder2", "T5", "ViT",
]  # fmt: skip
CASES = "trains or accumulates_until or frees or resumes or starts or bfloat16"
_LIMIT_S = 900
# What FSDP2 of torch 2.13 is known to do wrong, by the model in which it shows: text of the headline of the red case.
_TWO_NAMES = "visits a module once"
_UNUSED = "Missing optimizer state for parameter"  # section 49 of docs/what-it-found.md
_KNOWN = {
    ("Clip", "torch.fsdp2"): "doesn't support scalar parameters",
    ("Llava", "torch.fsdp2"): _UNUSED,
    ("Longformer", "torch.fsdp2"): _UNUSED,
    ("PromptTuning", "torch.fsdp2"): _TWO_NAMES,
    ("SegmentAnything", "torch.fsdp2"): _UNUSED,
    ("Spline", "torch.fsdp2"): "no hooks on an output that holds no tensors",
    ("Translator", "torch.fsdp2"): _TWO_NAMES,
}
_LETTERS = {Verdict.PASSED: "passed", Verdict.UNSUPPORTED: "not declared", Verdict.KNOWN_FAILURE: "known"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested models and print the table; 1 if a failure is not known, or a known one did not occur."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="names of classes; default: all")
    parser.add_argument("--engine", action="append", help="default: torch.fsdp2")
    parser.add_argument("--python", type=Path, help="an environment that has all packages already")
    parser.add_argument("-k", default=CASES, help="which cases; default: %(default)s")
    asked = parser.parse_args(argv)
    python = asked.python or _environment()
    rows = []
    specs = {spec.rpartition(":")[2]: [spec] for spec in _specs()}
    for name, spec in (specs | {name: ["--hf", f"{name}Config"] for name in CONFIGURATIONS}).items():
        if asked.models and name not in asked.models:
            continue
        for engine in asked.engine or ["torch.fsdp2"]:
            out = RUNS / f"{name}@{engine}"
            _run(python, spec, engine, out, asked.k)
            rows.append([name, engine, *_cells(out)])
            print(*rows[-1], sep="  ", flush=True)
    print(tabulate(rows, headers=["model", "engine", "verdicts", "first that is red"], tablefmt="github"))
    return 1 if any(not _is_as_known(*row) for row in rows) else 0


def _is_as_known(model: str, engine: str, verdicts: str, red: str) -> bool:
    known = _KNOWN.get((model, engine), "")
    return known in red if known else not red


def _environment() -> Path:
    python = environment(ENVIRONMENTS / "models", *PACKAGES)
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True, check=False).returncode:
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=True)
        with (Path(found.stdout.strip()) / "torchvision" / "extension.py").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(_NAMES)
    return python


def _specs() -> Iterator[str]:
    """List the public classes that build a model: parsed, not imported, since this environment lacks their packages."""
    for file in sorted(MODELS.glob("*.py")):
        building = set[str]()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & building or "build" in {getattr(n, "name", "") for n in node.body}:
                building.add(node.name)
                if not node.name.startswith("_"):
                    yield f"{file}:{node.name}"


def _run(python: Path, spec: list[str], engine: str, out: Path, cases: str) -> None:
    if (out / "report.html").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    how = ["--engine", engine, "-k", cases, "--out", str(out)]
    command = [str(python), "-m", "shardproof", "check", *spec, *how]
    # What `--hf` writes lies in the working folder, and must not be there already.
    with tempfile.TemporaryDirectory() as folder, _log(out).open("w", encoding="utf-8") as log:
        there = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=there, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)


def _log(out: Path) -> Path:
    """Return a run's log file; not `with_suffix`, which would remove ".ddp" from "Llama@torch.ddp"."""
    return out.with_name(f"{out.name}.log")


def _cells(out: Path) -> tuple[str, str]:
    """Return the verdicts of a run, counted, and the headline of its first failure, or the refusal."""
    if not out.exists():
        log = _log(out).read_text(encoding="utf-8").strip()
        return "refused", log.splitlines()[-1] if log else "no output"
    records: tuple[Record, ...] = tuple(read_run(out).records)
    counts = {v: sum(r.verdict is v for r in records) for v in Verdict}
    red = next((r for r in records if r.verdict not in _LETTERS), None)
    verdicts = ", ".join(f"{n} {_LETTERS.get(v, v.name)}" for v, n in counts.items() if n)
    return verdicts, "" if red is None else f"{red.case}: {red.headline}"


if __name__ == "__main__":
    sys.exit(main())
