"""Keeps torch's device meshes in step with the groups.

A `DeviceMesh` stores ranks: a grid of them, and this process's place in it. Its groups are edited like all others, but
after a loss its ranks are out of date. So every mesh is registered by its slots when it is made, and updated after each
edit of the groups:

    its slots are all members           the grid as it was made, with the current ranks
    a row, a column, a plane is lost    the grid without it, with as many dimensions as before
    else the grid is uneven             there is no grid: `mesh`, `shape` and `get_coordinate()` are refused; sizes,
                                        local ranks, groups and slices are those of this process's own rows

One-dimensional meshes are never uneven. A slice is taken from the mesh as it was made, and then updated. Flattening and
unflattening make groups, so all members are needed. A pickled mesh, or a copy, is not registered.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed.device_mesh as torch_meshes
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh

from ntp_plugin.errors import Refused

_RANK_ATTRIBUTES = ("_layout", "_rank_map", "_flatten_rank_map", "_rank", "_coordinate_on_dim", "_hash")
"""The attributes of a mesh that depend on ranks."""


class _NoGrid:
    """Stands in for the grid of an uneven mesh: any use of it is refused."""

    def _refuse(self, *_: object) -> NoReturn:
        raise Refused(
            "this device mesh lost a rank that leaves its rows uneven, so that it is no grid",
            fix="ask a slice of one dimension, its groups, sizes or local ranks",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself may ask of any object
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = _refuse


@dataclasses.dataclass(frozen=True)
class _Row:
    """One dimension of an uneven mesh, as this process sees it."""

    length: int

    def numel(self) -> int:
        return self.length


@dataclasses.dataclass(frozen=True)
class _UnevenLayout(_NoGrid):
    """The layout of an uneven mesh: the queries that do not need a grid."""

    rows: tuple[_Row, ...]
    """Per dimension, the members of this process's own row; of length 0 if it is not in the mesh."""
    total: int

    def __len__(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def __getitem__(self, dimension: int) -> _Row:  # type: ignore[override]
        return self.rows[dimension]

    def numel(self) -> int:
        return self.total


@dataclasses.dataclass(frozen=True)
class _Made:
    """A mesh as it was made."""

    mesh: weakref.ref[DeviceMesh]
    members: tuple[int, ...]
    """Members of the world at that time."""
    slots: torch.Tensor
    attributes: dict[str, Any]


class DeviceMeshes:
    """All device meshes of this process, from `attach` to `detach`."""

    _CHANGED: ClassVar = ("__init__", "__getitem__", "_create_flatten_mesh", "_create_unflatten_mesh")

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._members: tuple[int, ...] = ()
        self._made: dict[int, _Made] = {}
        self._making_for: tuple[int, ...] | None = None
        self._originals: dict[str, Any] = {}

    def attach(self) -> None:
        """Register every mesh that is made from now on."""
        assert not self._originals, "meshes are attached once"
        self._originals = {name: getattr(DeviceMesh, name) for name in self._CHANGED}
        meshes, original = self, self._originals

        def make(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
            original["__init__"](mesh, *args, **options)
            meshes._remember(mesh)

        def slice_(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
            with meshes._as_made(mesh):
                sliced: DeviceMesh = original["__getitem__"](mesh, names)
            return sliced

        def flatten(mesh: DeviceMesh, name: str, *args: Any, **options: Any) -> None:
            if name not in mesh._get_root_mesh()._flatten_mapping:
                meshes._require_all(mesh)
                original["_create_flatten_mesh"](mesh, name, *args, **options)

        def unflatten(mesh: DeviceMesh, *args: Any, **options: Any) -> DeviceMesh:
            meshes._require_all(mesh)
            unflattened: DeviceMesh = original["_create_unflatten_mesh"](mesh, *args, **options)
            return unflattened

        for name, changed in zip(self._CHANGED, (make, slice_, flatten, unflatten), strict=True):
            setattr(DeviceMesh, name, changed)

    def detach(self) -> None:
        """Restore torch's methods; the meshes stay as they are."""
        for name, original in self._originals.items():
            setattr(DeviceMesh, name, original)
        self._originals.clear()
        self._made.clear()

    def update(self, members: tuple[int, ...]) -> None:
        """Update all meshes to these slots of the world, in the order of their ranks."""
        self._members = members
        for made in list(self._made.values()):
            self._update(made)

    # ------------------------------------------------ one mesh

    def _remember(self, mesh: DeviceMesh) -> None:
        members = self._making_for or self._members
        if not members:  # there is no world to follow
            return
        grid = mesh._layout.remap_to_tensor(mesh._rank_map)
        if grid.size(0) > 1:  # a slice: it holds all slices of its kind, of which this process is in one or none
            mine = (grid == members.index(self._slot)).flatten(1).any(1).nonzero().flatten().tolist()
            if not mine:
                return
            grid = grid[mine[0]]
        else:
            grid = grid[0]
        slots = torch.tensor(members)[grid.long()]
        attributes = {name: getattr(mesh, name, None) for name in _RANK_ATTRIBUTES} | {"_hash": None}
        key = id(mesh)
        reference = weakref.ref(mesh, lambda _: self._made.pop(key, None))
        self._made[key] = _Made(mesh=reference, members=members, slots=slots, attributes=attributes)

    def _update(self, made: _Made) -> None:
        mesh = made.mesh()
        if mesh is None:
            return
        attributes = made.attributes if made.members == self._members else self._current(made)
        for name, value in attributes.items():
            setattr(mesh, name, value)

    def _current(self, made: _Made) -> dict[str, Any]:
        ranks = {slot: rank for rank, slot in enumerate(self._members)}
        here = torch.isin(made.slots, torch.tensor(self._members))
        kept = (
            [here.movedim(dimension, 0).flatten(1).any(1) for dimension in range(here.dim())]
            if here.dim() > 1
            else [here]
        )
        grid = made.slots
        for dimension, keep in enumerate(kept):
            grid = grid.index_select(dimension, keep.nonzero().flatten())
        rank = ranks[self._slot]
        mapped = [ranks[slot] for slot in grid.flatten().tolist() if slot in ranks]
        truth = {
            "_rank_map": torch.tensor(mapped, dtype=torch.int),
            "_flatten_rank_map": tuple(mapped),
            "_rank": rank,
            "_hash": None,
        }
        if len(mapped) < grid.numel():
            return truth | {"_layout": self._uneven(made.slots, here), "_coordinate_on_dim": _NoGrid()}
        at = (grid == self._slot).nonzero().tolist()
        layout = _MeshLayout.from_sizes_strides(tuple(grid.size()))
        return truth | {"_layout": layout, "_coordinate_on_dim": tuple(at[0]) if at else None}

    def _uneven(self, slots: torch.Tensor, here: torch.Tensor) -> _UnevenLayout:
        total = int(here.sum())
        at = (slots == self._slot).nonzero().tolist()
        if not at:
            return _UnevenLayout(rows=(_Row(0),) * slots.dim(), total=total)
        lengths = []
        for dimension in range(slots.dim()):
            row = tuple(slice(None) if other == dimension else at[0][other] for other in range(slots.dim()))
            lengths.append(_Row(int(here[row].sum())))
        return _UnevenLayout(rows=tuple(lengths), total=total)

    # ------------------------------------------------ what needs the mesh as it was made

    @contextlib.contextmanager
    def _as_made(self, mesh: DeviceMesh) -> Iterator[None]:
        """Restore this mesh and its root as they were made; update them, and all meshes made meanwhile, afterwards."""
        parts = [made for part in (mesh, mesh._get_root_mesh()) if (made := self._made.get(id(part))) is not None]
        if all(made.members == self._members for made in parts):
            yield
            return
        members, get_rank = parts[0].members, torch_meshes.get_rank  # type: ignore[attr-defined]
        for made in parts:
            self._set(made)
        known = set(self._made)
        self._making_for = members
        torch_meshes.get_rank = functools.partial(members.index, self._slot)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch_meshes.get_rank = get_rank  # type: ignore[attr-defined]
            self._making_for = None
            for key, made in list(self._made.items()):
                if made in parts or key not in known:
                    self._update(made)

    def _set(self, made: _Made) -> None:
        mesh = made.mesh()
        assert mesh is not None, "it is being sliced"
        for name, value in made.attributes.items():
            setattr(mesh, name, value)

    def _require_all(self, mesh: DeviceMesh) -> None:
        for part in (mesh, mesh._get_root_mesh()):
            made = self._made.get(id(part))
            if made is not None and made.members != self._members:
                raise Refused(
                    "a device mesh whose ranks have changed cannot be flattened or unflattened: that makes groups of "
                    "the ranks that it was made of",
                    fix="do it before any rank is lost, or when all are back",
                )
