"""How a mesh reacts to a loss, on a grid of eight slots as slot 5 sees it; no group is made."""

import copy
import functools
import gc

import pytest
import torch.distributed.device_mesh as torch_meshes
from torch.distributed.device_mesh import DeviceMesh

from ntp_plugin.errors import Refused
from ntp_plugin.groups.device_meshes import DeviceMeshes

MINE, ALL = 5, tuple(range(8))
CUBE = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.fixture
def tell(monkeypatch):
    """Set the members; torch derives the rank of this process from them."""
    meshes = DeviceMeshes(MINE)
    meshes.attach()

    def set_members(*members):
        monkeypatch.setattr(torch_meshes, "get_rank", functools.partial(members.index, MINE))
        meshes.update(members)

    set_members(*ALL)
    set_members.made = meshes._made
    yield set_members
    meshes.detach()


@pytest.fixture
def cube(tell):
    mesh = DeviceMesh("cpu", CUBE, mesh_dim_names=("pp", "dp", "tp"), _init_backend=False)
    mesh._dim_group_names = ["pp", "dp", "tp"]
    return mesh


def test_a_lost_plane_leaves_a_smaller_grid(tell, cube):
    tell(4, 5, 6, 7)
    assert cube.mesh.tolist() == [[[0, 1], [2, 3]]]
    assert (cube.shape, cube.get_coordinate(), cube.size()) == ((1, 2, 2), (0, 0, 1), 4)
    tell(1, 3, 5, 7)
    assert cube.mesh.tolist() == [[[0], [1]], [[2], [3]]]
    assert (cube.shape, cube.get_coordinate()) == ((2, 2, 1), (1, 0, 0))


def test_lost_slots_beside_a_mesh_only_renumber_it(tell):
    mesh = DeviceMesh("cpu", [[4, 5], [6, 7]], _init_backend=False)
    tell(0, 4, 5, 6, 7)
    assert mesh.mesh.tolist() == [[1, 2], [3, 4]]
    assert mesh.get_coordinate() == (0, 1)


@pytest.mark.parametrize(
    "ask", [lambda mesh: mesh.mesh, lambda mesh: mesh.shape, lambda mesh: mesh.get_coordinate()[0]]
)
def test_an_uneven_mesh_is_no_grid(tell, cube, ask):
    tell(0, 1, 4, 5, 6, 7)
    assert (cube.ndim, cube.size(), [cube.size(dimension) for dimension in range(3)]) == (3, 6, [2, 2, 2])
    with pytest.raises(Refused, match="no grid"):
        ask(cube)


def test_slices_taken_before_and_after_a_loss_are_equal(tell, cube):
    before = {names: cube[names] for names in ("pp", "dp", "tp", ("dp", "tp"))}
    tell(0, 1, 3, 5, 6, 7)
    after = {names: cube[names] for names in before}
    for names, mesh in before.items():
        if names == ("dp", "tp"):
            assert mesh.size() == after[names].size() == 3
        else:
            assert mesh.mesh.tolist() == after[names].mesh.tolist()
            assert mesh == after[names]
    assert [after[name].mesh.tolist() for name in ("pp", "dp", "tp")] == [[1, 3], [3, 5], [3]]


def test_with_all_ranks_back_a_mesh_is_unchanged(tell, cube):
    late, made = [], (hash(cube), cube._layout, cube._flatten_rank_map)
    for members in ((0, 1, 4, 5, 6, 7), (4, 5), (5,)):
        tell(*members)
        late.append(cube["dp", "tp"])
    tell(*ALL)
    assert (hash(cube), cube._layout, cube._flatten_rank_map) == made
    assert cube.mesh.tolist() == CUBE
    assert all(mesh == cube["dp", "tp"] for mesh in late)


def test_making_groups_is_refused_while_slots_are_lost(tell, cube):
    tell(0, 1, 2, 3, 4, 5)
    with pytest.raises(Refused, match="flattened"):
        cube["dp", "tp"]._flatten()
    with pytest.raises(Refused, match="flattened"):
        cube._unflatten("tp", (1, 2), ("a", "b"))


def test_an_unreferenced_mesh_is_forgotten(tell, cube):
    kept, copied = cube["tp"], copy.copy(cube["dp"])
    del kept
    gc.collect()
    assert len(tell.made) == 1
    assert copied.mesh.tolist() == [5, 7]


def test_detaching_restores_torch():
    before = dict(vars(DeviceMesh))
    meshes = DeviceMeshes(MINE)
    meshes.attach()
    assert vars(DeviceMesh)["__init__"] is not before["__init__"]
    meshes.detach()
    assert dict(vars(DeviceMesh)) == before
