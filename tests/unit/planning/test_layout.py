"""Meshes, regions and layouts against torch.chunk and against hand-made groups."""

from __future__ import annotations

import random

import pytest
import torch

from rlspeed.errors import LayoutError
from rlspeed.planning.layout import Layout, Mesh, Region


def test_regions_are_those_of_torch_chunk() -> None:
    """Nested torch.chunk in the order of the cuts, uneven and empty parts included, gives the same numbers."""
    rng = random.Random(0)
    for _ in range(400):
        sizes = {"a": rng.randint(1, 4), "b": rng.randint(1, 3), "c": rng.randint(1, 3)}
        mesh = Mesh.of(range(sizes["a"] * sizes["b"] * sizes["c"]), **sizes)
        shape = (rng.randint(0, 11), rng.randint(0, 7))
        cuts: list[list[str]] = [[], []]
        for axis in rng.sample(list(sizes), 3):
            if place := rng.randint(0, 2):
                cuts[place - 1].append(axis)
        layout = Layout(mesh=mesh, cuts=tuple(map(tuple, cuts)))
        whole = torch.arange(shape[0] * shape[1]).reshape(shape)
        for rank in mesh.ranks:
            local = whole
            for dim, cut in enumerate(cuts):
                for axis in cut:
                    parts = local.chunk(sizes[axis], dim=dim)
                    at = mesh.coordinate(rank)[axis]
                    local = parts[at] if at < len(parts) else local.narrow(dim, 0, 0)
            region = layout.region(shape, rank)
            assert tuple(local.shape) == region.shape
            assert torch.equal(whole[region.slices(Region(offset=(0, 0), shape=shape))], local)
            assert layout.regions(shape)[rank] == region


def test_cells_tile_the_tensor() -> None:
    mesh = Mesh.of([5, 3, 1, 8, 2, 0], x=2, y=3)
    layout = Layout(mesh=mesh, cuts=(("y",), ()))
    cells = layout.cells((4, 2))
    assert [c.offset for c, _ in cells] == [(0, 0), (2, 0)]
    assert [holders for _, holders in cells] == [(5, 8), (3, 2)]  # the third part is empty: ceil(4 / 3) = 2
    assert layout.region((4, 2), 1) == Region(offset=(4, 0), shape=(0, 2))


def test_scalars_are_replicated() -> None:
    layout = Layout(mesh=Mesh.of([0, 1], dp=2), cuts=())
    assert layout.cells(()) == ((Region(offset=(), shape=()), (0, 1)),)
    assert Region(offset=(), shape=()).num_elements == 1


def test_groups_and_split() -> None:
    mesh = Mesh.of(range(8), dp=2, tp=4)
    assert mesh.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    halves = mesh.split("tp", 2, "micro_dp")
    assert halves.axes == (("dp", 2), ("tp", 2), ("micro_dp", 2))
    assert halves.groups("tp", "dp") == ((0, 4, 2, 6), (1, 5, 3, 7))


def test_regions_meet() -> None:
    a = Region(offset=(0, 2), shape=(4, 4))
    assert a.meet(Region(offset=(3, 0), shape=(4, 4))) == Region(offset=(3, 2), shape=(1, 2))
    assert a.meet(Region(offset=(4, 0), shape=(4, 4))) is None
    assert a.meet(Region(offset=(1, 3), shape=(0, 1))) is None
    assert Region(offset=(1, 3), shape=(2, 1)).slices(a) == (slice(1, 3), slice(1, 2))
    assert Region(offset=(9, 9), shape=(0, 1)).within(a)
    with pytest.raises(LayoutError, match="not inside"):
        Region(offset=(0, 0), shape=(1, 1)).slices(a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mesh.of(range(3), a=2),
        lambda: Mesh.of([], a=0),
        lambda: Mesh.of([1, 1], a=2),
        lambda: Mesh.of([-1, 1], a=2),
        lambda: Mesh(axes=(("a", 1), ("a", 2)), ranks=(0, 1)),
        lambda: Mesh.of(range(4), a=4).split("a", 3, "b"),
        lambda: Mesh.of(range(4), a=4).groups("b"),
        lambda: Mesh.of(range(4), a=4).coordinate(4),
        lambda: Layout(mesh=Mesh.of([0], a=1), cuts=(("b",),)),
        lambda: Layout(mesh=Mesh.of([0], a=1), cuts=(("a",), ("a",))),
        lambda: Layout(mesh=Mesh.of([0], a=1), cuts=(("a",),)).region((1, 2), 0),
        lambda: Layout(mesh=Mesh.of([0], a=1), cuts=(("a",),)).regions((1, 2)),
        lambda: Region(offset=(0,), shape=(1, 2)),
        lambda: Region(offset=(0,), shape=(-1,)),
    ],
)
def test_refused(make) -> None:
    with pytest.raises(LayoutError):
        make()
