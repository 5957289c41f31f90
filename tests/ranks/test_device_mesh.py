"""Device meshes through a loss and a return: a one-dimensional one, and a two by two one with its slices."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ntp_plugin.errors import Refused
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless

SIZE = 4


def look(meshes):
    """All that a mesh says of itself, with the sum of the slots that each of its groups reaches."""
    return {name: look_at(mesh) for name, mesh in meshes.items()}


def look_at(mesh):
    def answer_of(ask):
        try:
            answer = ask()
        except Refused:
            return "refused"
        return answer.tolist() if isinstance(answer, torch.Tensor) else answer

    sums = []
    for dimension in range(mesh.ndim):
        total = torch.tensor([float(SLOT)])
        dist.all_reduce(total, group=mesh.get_group(dimension))
        sums.append(int(total))
    return {
        "mesh": answer_of(lambda: mesh.mesh),
        "shape": answer_of(lambda: mesh.shape),
        "coordinate": answer_of(lambda: list(mesh.get_coordinate())),
        "size": mesh.size(),
        "sizes": [mesh.size(dimension) for dimension in range(mesh.ndim)],
        "group sizes": [group.size() for group in mesh.get_all_groups()],
        "rank": mesh.get_rank(),
        "local ranks": [mesh.get_local_rank(dimension) for dimension in range(mesh.ndim)],
        "sums": sums,
        "hash": hash(mesh),
    }


def play(rank):
    """Inspect all meshes when they are made, after a loss, and after the return."""
    global SLOT  # noqa: PLW0603
    SLOT = rank.slot
    elastic = ElasticRank(rank.place)
    line = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("world",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {"line": line, "grid": grid, "tp": grid["tp"], "dp": grid["dp"]}
    meshes["of group"] = DeviceMesh.from_group(grid.get_group("tp"), "cpu")
    driver = elastic.drive(Stateless())
    elastic.start()
    looks = []

    def look_when(size):
        while len(elastic.groups.members) != size:
            time.sleep(0.001)
            driver.run_with_recovery(elastic.groups.check)
        late = {"late tp": grid["tp"], "late dp": grid["dp"]}
        looks.append(driver.run_with_recovery(lambda: look(meshes | late)))

    if not rank.joining:
        look_when(SIZE)
        rank.write([["ready", rank.slot]])
        look_when(SIZE - 1)
        with pytest.raises(Refused, match="flattened"):
            grid._flatten("all")
        rank.write([["looked", rank.slot]])
    look_when(SIZE)
    elastic.leave()
    return looks


@pytest.fixture(scope="module")
def looks():
    """Slot 2 dies and rejoins."""
    with Ranks(SIZE, play) as ranks:
        ranks.wait_for_rows(SIZE, "ready")
        ranks.kill(2)
        ranks.wait_for_rows(SIZE - 1, "looked")
        ranks.start_again(2)
        return ranks.wait()


def test_a_one_dimensional_mesh_has_as_many_ranks_as_members(looks):
    for slot, rank in ((0, 0), (1, 1), (3, 2)):
        line = looks[slot][1]["line"]
        assert line["mesh"] == [0, 1, 2]
        assert (line["shape"], line["size"], line["sizes"], line["group sizes"]) == ((3,), 3, [3], [3])
        assert (line["rank"], line["local ranks"], line["coordinate"]) == (rank, [rank], [rank])
        assert line["sums"] == [4]


def test_an_uneven_mesh_answers_some_queries_and_refuses_the_rest(looks):
    grids = {slot: looks[slot][1]["grid"] for slot in (0, 1, 3)}
    for grid in grids.values():
        assert [grid[name] for name in ("mesh", "shape", "coordinate")] == ["refused"] * 3
        assert grid["size"] == 3
        assert grid["sizes"] == grid["group sizes"]
    assert [grids[slot]["sizes"] for slot in (0, 1, 3)] == [[1, 2], [2, 2], [2, 1]]
    assert [grids[slot]["local ranks"] for slot in (0, 1, 3)] == [[0, 0], [0, 1], [1, 0]]
    assert [grids[slot]["sums"] for slot in (0, 1, 3)] == [[0, 1], [4, 1], [4, 3]]


@pytest.mark.parametrize("prefix", ["", "late "])
def test_slices_of_it_are_lines(looks, prefix):
    """Slices taken before the loss, and slices taken after it."""
    tp = [looks[slot][1][f"{prefix}tp"] for slot in (0, 1, 3)]
    dp = [looks[slot][1][f"{prefix}dp"] for slot in (0, 1, 3)]
    assert [mesh["mesh"] for mesh in tp] == [[0, 1], [0, 1], [2]]
    assert [mesh["mesh"] for mesh in dp] == [[0], [1, 2], [1, 2]]
    for mesh in (*tp, *dp):
        assert mesh["sizes"] == mesh["group sizes"] == [len(mesh["mesh"])]
        assert mesh["mesh"][mesh["local ranks"][0]] == mesh["rank"]
        assert mesh["coordinate"] == mesh["local ranks"]


def test_a_mesh_made_of_a_group_follows_it(looks):
    assert [looks[slot][1]["of group"]["mesh"] for slot in (0, 1, 3)] == [[0, 1], [0, 1], [2]]


def test_meshes_are_restored_when_a_rank_rejoins(looks):
    for slot in (0, 1, 3):
        assert looks[slot][2] == looks[slot][0]
    assert looks[2][-1]["grid"]["mesh"] == [[0, 1], [2, 3]]
    assert looks[2][-1]["line"]["coordinate"] == [2]
