"""The optimizer: fp32 masters behind 16-bit parameters, clipping, schedules, loss scale, steps without tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from rlspeed.config.schema import Optimizer
from rlspeed.engine.packed import pack_sequences
from rlspeed.engine.world import World
from rlspeed.errors import ConfigError
from rlspeed.training import checkpoint
from rlspeed.training.optim import LossScale, MasterAdamW, lr_factor
from rlspeed.training.roles import Trainable


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def _steps(model: nn.Module, optimizer: MasterAdamW, count: int) -> list[float]:
    norms = []
    for i in range(count):
        torch.manual_seed(100 + i)
        x = torch.randn(8, 6, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x).float().square().sum() * optimizer.scale.value).backward()
        norms.append(optimizer.step())
    return norms


def test_fp32_equals_torch_adamw() -> None:
    cfg = Optimizer(lr=1e-2, weight_decay=0.1, max_grad_norm=None)
    ours, theirs = _model(), _model()
    _steps(ours, MasterAdamW(ours, cfg, total_steps=10), 5)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=cfg.betas, eps=cfg.eps)
    for i in range(5):
        torch.manual_seed(100 + i)
        reference.zero_grad()
        theirs(torch.randn(8, 6)).square().sum().backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_clip_uses_the_norm_of_all_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = MasterAdamW(model, Optimizer(lr=1.0, max_grad_norm=1.0), total_steps=1)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step() == pytest.approx(5.0)
    # first moment = (1 - beta1) * clipped gradient, and the clipped gradient has norm 1
    assert float(optimizer.state_tensors()["weight.exp_avg"].norm()) == pytest.approx(0.1, rel=1e-4)


def test_small_updates_survive_in_bf16() -> None:
    """An update of 1e-5 is far below bf16's step of 4e-3 near 1: without a master 400 of them change nothing."""
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    optimizer = MasterAdamW(model, Optimizer(lr=1e-5, max_grad_norm=None), total_steps=1000)
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    master = optimizer.masters[0]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full_like(master, 1.0 - 400 * 1e-5), atol=1e-5, rtol=0)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, master.to(torch.bfloat16))
    assert model.weight[0, 0].item() < 1.0


def test_micro_batches_add_up_in_fp32() -> None:
    """dtype/bf16_accumulation: 4096 gradients of 0.01 are 40.96, where a bf16 sum stalls at 4."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(model, Optimizer(), total_steps=1)
    x = torch.full((1, 1), 0.01, dtype=torch.bfloat16)
    for _ in range(4096):
        model(x).sum().backward()
    assert model.weight.grad is None
    assert float(optimizer.masters[0].grad) == pytest.approx(4096 * float(x), rel=1e-5)


def test_non_finite_gradient_changes_nothing() -> None:
    model = _model()
    optimizer = MasterAdamW(model, Optimizer(lr=1e-2), total_steps=4)
    _steps(model, optimizer, 1)
    before = [p.clone() for p in model.parameters()]
    moments = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    assert math.isnan(optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.state_tensors().items())
    assert optimizer.steps_done == 1


def test_fp16_gradients_are_scaled_and_unscaled() -> None:
    """A gradient of 1e-8 is 0 in fp16; with the loss scale it arrives in the master."""
    model = nn.Linear(1, 1, bias=False).to(torch.float16)
    optimizer = MasterAdamW(model, Optimizer(max_grad_norm=None), total_steps=1, loss_scaling=True)
    x = torch.ones(1, 1, dtype=torch.float16)
    (model(x).float().sum() * 1e-8 * optimizer.scale.value).backward()
    assert float(optimizer.masters[0].grad) == pytest.approx(1e-8, rel=1e-2)


@contextmanager
def _without_compiling() -> Iterator[None]:
    """torchao compiles its kernel; run as it is written it computes the same in no time."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _kind(kind: str) -> str:
    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    return kind


def _wide(dtype: torch.dtype) -> nn.Sequential:
    """The first matrix is large enough for moments in 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw_offload", "adamw8bit"])
def test_kinds_follow_adamw(kind: str, dtype: torch.dtype) -> None:
    """The same masters from the same gradients: exactly on the host, within a tenth of the way in 8 bits."""
    runs = []
    with _without_compiling():
        for chosen in ("adamw", _kind(kind)):
            model = _wide(dtype)
            cfg = Optimizer(kind=chosen, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
            optimizer = MasterAdamW(model, cfg, total_steps=20)
            start = [m.detach().clone() for m in optimizer.masters]
            torch.manual_seed(7)
            for _ in range(5):
                optimizer.zero_grad()
                for param in model.parameters():
                    param.backward(torch.randn_like(param))
                optimizer.step()
            assert all(torch.equal(p, m.to(dtype)) for p, m in zip(model.parameters(), optimizer.masters))
            assert all(m.dtype == torch.float32 for m in optimizer.masters)
            runs.append([m.detach() - s for m, s in zip(optimizer.masters, start)])
    for mine, plain in zip(*reversed(runs)):
        error = (mine - plain).norm() / plain.norm()
        assert error < (1e-6 if kind == "adamw_offload" else 0.1)


@pytest.mark.parametrize("kind", ["adamw_offload", "adamw8bit"])
def test_kinds_skip_a_gradient_that_is_not_finite(kind: str) -> None:
    model = _wide(torch.bfloat16)
    optimizer = MasterAdamW(model, Optimizer(kind=_kind(kind), lr=1e-2), total_steps=9)
    with _without_compiling():
        _steps_bf16(model, optimizer, 1)
        before = {n: t.clone() for n, t in optimizer.state_tensors().items()}
        next(model.parameters()).backward(torch.full((1024, 6), math.inf, dtype=torch.bfloat16))
        assert math.isinf(optimizer.step())
    assert optimizer.steps_done == 1
    assert all(torch.equal(t, before[n]) for n, t in optimizer.state_tensors().items())


@pytest.mark.parametrize("kind", ["adamw_offload", "adamw8bit"])
def test_kinds_go_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Written after three steps, read by a new optimizer without moments: the next two steps give the same bits."""
    cfg = Optimizer(kind=_kind(kind), lr=1e-2)
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=None)
    a, b = _wide(torch.bfloat16), _wide(torch.bfloat16)
    first, second = MasterAdamW(a, cfg, total_steps=9), MasterAdamW(b, cfg, total_steps=9)
    one, other = (checkpoint.RoleState(members=world, role=Trainable(m, o)) for m, o in ((a, first), (b, second)))
    with _without_compiling():
        _steps_bf16(a, first, 3)
        progress = checkpoint.Progress(
            step=3, kl_coef=0.0, optimizer_steps={"actor": 3}, policy_version=3, total_tokens=1
        )
        folder = checkpoint.save(tmp_path, world, {"actor": one}, progress, keep=1)
        checkpoint.load(folder, world, {"actor": other})
        if kind == "adamw8bit":
            names = set(second.state_tensors())
            assert {"0.weight.exp_avg.codes", "0.weight.exp_avg_sq.scale", "2.bias.exp_avg"} <= names
        assert second.steps_done == 3
        _steps_bf16(a, first, 2)
        _steps_bf16(b, second, 2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(first.masters, second.masters))


def _steps_bf16(model: nn.Module, optimizer: MasterAdamW, count: int) -> None:
    for i in range(count):
        torch.manual_seed(i)
        for param in model.parameters():
            param.backward(torch.randn_like(param))
        optimizer.step()


def test_eight_bits_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"pip install torchao, or take optim\.\*\.kind=adamw"):
        MasterAdamW(_model(), Optimizer(kind="adamw8bit"), total_steps=1)


def test_loss_scale_moves() -> None:
    scale = LossScale(64.0, dynamic=True)
    scale.shrink()
    assert scale.value == 32.0
    for _ in range(200):
        scale.grow()
    assert scale.value == 64.0
    fixed = LossScale(1.0, dynamic=False)
    fixed.shrink()
    assert fixed.value == 1.0


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1]),
    ],
)
def test_lr_course(schedule: str, want: list[float]) -> None:
    cfg = Optimizer(warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    got = [lr_factor(step, cfg, 12) for step in (0, 1, 2, 7, 12)]
    assert got == pytest.approx(want)


def test_state_round_trip_has_real_moments() -> None:
    """life-05: the saved moments are not empty and not zero, and loading them in place continues the same course."""
    a, b = _model(), _model()
    first, second = MasterAdamW(a, Optimizer(lr=1e-2), total_steps=9), MasterAdamW(b, Optimizer(lr=1e-2), total_steps=9)
    _steps(a, first, 3)
    saved = {k: v.clone() for k, v in first.state_tensors().items()}
    assert saved
    assert all(float(v.abs().sum()) > 0 for v in saved.values())
    for name, tensor in second.state_tensors().items():
        tensor.copy_(saved[name])
    with torch.no_grad():
        for p, q in zip(a.parameters(), b.parameters()):
            q.copy_(p)
    second.steps_done = first.steps_done
    _steps(a, first, 2)
    _steps(b, second, 2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_an_update_without_tokens_changes_nothing() -> None:
    """num-05: neither weights (weight decay would) nor moments nor the learning rate's course; and it says so."""
    model = _model()
    optimizer = MasterAdamW(model, Optimizer(lr=1e-2, weight_decay=0.5, warmup_steps=9), total_steps=10)
    _steps(model, optimizer, 2)
    role = Trainable(model, optimizer)
    before = {k: v.clone() for k, v in (*model.state_dict().items(), *optimizer.state_tensors().items())}
    lr, spare = optimizer.lr, pack_sequences([], [])
    done = role.update([spare], lambda batch: torch.tensor(math.nan, requires_grad=True), global_tokens=0)
    assert (done.empty, done.grad_norm, optimizer.lr, optimizer.steps_done) == (True, 0.0, lr, 2)
    after = {**model.state_dict(), **optimizer.state_tensors()}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    _steps(model, optimizer, 1)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
