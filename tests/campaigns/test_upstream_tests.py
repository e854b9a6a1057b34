"""Torch's own tests run on torch's engines and on the reference engine, and say why only torch's passes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell import ROOT, python

# What torch's classes of tests import.
_EXPECTTEST = "import unittest\nTestCase = unittest.TestCase\n"
_HEAD = """
from torch import nn
from torch.testing._internal.common_fsdp import FSDPTestMultiThread
{imports}

class TestTiny(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2
"""
_FILES = {
    "test_shards": (
        """
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
""",
        r"""
    def test_passes(self):
        self.assertIsInstance(fully_shard(nn.Linear(2, 2).cuda()), FSDPModule)

    def test_words(self):
        with self.assertRaisesRegex(ValueError, r"forward: ModuleList\(\)"):
            fully_shard(nn.ModuleList())

    def test_private(self):
        self._check(fully_shard(nn.Linear(2, 2))._get_fsdp_state()._fsdp_param_group)

    def _check(self, group):
        self.assertIsInstance(group, FSDPParamGroup)

    def test_observable(self):
        self.assertEqual(fully_shard.__module__, "torch.distributed.fsdp")
        self.assertRaises(ValueError, fully_shard, nn.ModuleList())

    def test_fails(self):
        self.fail()
""",
    ),
    "test_replicas": (
        "from torch.distributed._composable.replicate_with_fsdp import replicate, ReplicateModule",
        """
    def test_passes(self):
        self.assertIsInstance(replicate(nn.Linear(2, 2)), ReplicateModule)

    def test_observable(self):
        self.assertIn("torch.distributed", replicate.__module__)
""",
    ),
    "test_wrapped": (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy",
        """
    def test_passes(self):
        model = FSDP(nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        self.assertEqual(len(FSDP.fsdp_modules(model)), 2)

    def test_observable(self):
        self.assertIn("torch.distributed", FSDP.__module__)
""",
    ),
}


@pytest.mark.slow
def test_every_interface_has_its_pair_and_every_failure_its_class(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "expecttest.py").write_text(_EXPECTTEST)
    for name, (imports, tests) in _FILES.items():
        (folder / f"{name}.py").write_text(_HEAD.format(imports=imports) + tests)
    out = tmp_path / "out.jsonl"
    paths = f"{ROOT}:{tmp_path}"
    done = python("-m", "campaigns.upstream_tests", str(folder), "--out", str(out), PYTHONPATH=paths)
    assert not done.returncode, done.stderr
    table = [line.rpartition(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert {
        "| fully_shard | test_shards | 5 | 4 | 1 | 1 | 1 | 1",
        "| replicate | test_replicas | 2 | 2 | 1 | 0 | 0 | 1",
        "| FullyShardedDataParallel | test_wrapped | 2 | 2 | 1 | 0 | 0 | 1",
        "| all | all | 9 | 8 | 3 | 1 | 1 | 3",
    } <= {*table}
    (private,) = (
        line for line in done.stdout.splitlines() if line.startswith("private: TestTiny.test_private: ")
    )
    assert private.endswith("['FSDPParamGroup', '_fsdp_param_group', '_get_fsdp_state']")
    ran = out.read_text().splitlines()
    assert {line.split('"')[1] for line in ran} == {"torch", "reference"}
