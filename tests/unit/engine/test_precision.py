"""Precision by name and device: what is native, what is refused, and the reason that is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlspeed.engine.precision import native_bf16, resolve
from rlspeed.errors import DeviceError

CASES = {
    c["id"]: c for c in json.loads((Path(__file__).parents[2] / "conformance" / "cases.json").read_text())["cases"]
}


def test_conformance_native_bf16():
    """dtype/bf16_support_check: torch's default check says yes on cards that only emulate."""
    case = CASES["dtype/bf16_support_check"]
    found = [native_bf16(tuple(c)) for c in case["input"]["capabilities"]]
    assert found == case["expected"]["native_bf16"]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_dev_12_bf16_without_hardware_is_refused(capability):
    """dev-12: never a silent fp16; the message says what the device has and what is needed."""
    with pytest.raises(DeviceError, match=rf"{capability[0]}\.{capability[1]}.*8\.0"):
        resolve("bf16", "cuda:0", capability=capability)
    picked = resolve("auto", "cuda:0", capability=capability)
    assert picked.compute == torch.float32
    assert "no bf16" in picked.reason
    assert f"{capability[0]}.{capability[1]}" in picked.reason


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("name", ["auto", "bf16"])
def test_bf16_where_it_is_native(capability, name):
    """bf16 for arithmetic, cache and wire; fp32 for masters, reductions, log-sum-exp and scalars."""
    p = resolve(name, "cuda:1", capability=capability)
    assert {p.compute, p.kv, p.wire} == {torch.bfloat16}
    assert {p.master, p.reduce, p.logits, p.loss} == {torch.float32}
    assert "bf16" in p.reason
    assert not p.needs_loss_scaling


def test_cpu():
    """A CPU does all of them; auto takes fp32."""
    assert resolve("auto", "cpu").compute == torch.float32
    assert "auto" in resolve("auto", "cpu").reason
    assert resolve("bf16", torch.device("cpu")).compute == torch.bfloat16
    assert resolve("fp16", "cpu").needs_loss_scaling
    assert resolve("fp32", "cpu").kv == torch.float32


def test_fp16_needs_loss_scaling_and_a_card_that_has_it():
    """fp16 is native from Volta on, and only when it is asked for."""
    assert resolve("fp16", "cuda:0", capability=(7, 5)).needs_loss_scaling
    with pytest.raises(DeviceError, match=r"6\.1"):
        resolve("fp16", "cuda:0", capability=(6, 1))


def test_fp32_everywhere_and_unknown_names_nowhere():
    """fp32 has no condition; a misspelt name is told what there is."""
    assert resolve("fp32", "cuda:0", capability=(6, 1)).compute == torch.float32
    with pytest.raises(DeviceError, match="auto, bf16, fp16, fp32"):
        resolve("bfloat16", "cpu")
    with pytest.raises(DeviceError, match="xpu"):
        resolve("bf16", "xpu")
