"""GPUs by their figures, so that a candidate can be compiled for one that is not there."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from ..cache.errors import TargetError
from ..cache.key import Device

#: Cards whose names jax knows, one for each compute capability that it can compile
#: for: while it lowers a kernel it asks for the capability by such a name.
CARD_OF_CAPABILITY = {
    "8.0": "NVIDIA A100",
    "8.6": "NVIDIA A10",
    "8.9": "NVIDIA L4",
    "9.0": "NVIDIA H100",
}
_SHIPPED = Path(__file__).with_name("targets.toml")


@dataclasses.dataclass(frozen=True)
class Target:
    """The figures of a GPU; see ``targets.toml`` for their units."""

    key: str
    name: str
    capability: str
    cores: int
    fp32_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_per_block: int
    memory: int
    l2: int
    bandwidth: int
    clock_ghz: float

    @property
    def device(self) -> Device:
        """The fingerprint that a real card of this kind has, but for its driver."""
        return Device(
            platform="cuda",
            name=self.name,
            capability=self.capability,
            cores=self.cores,
            shared_memory=self.shared_per_block,
            memory=self.memory,
        )

    @property
    def config_text(self) -> str:
        """The description of the card that XLA compiles for (GpuTargetConfigProto, as text)."""
        major, minor = self.capability.split(".")
        # Features that only the exact architecture has, such as Hopper's wgmma.
        feature = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_per_core}
              shared_memory_per_block_optin: {self.shared_per_block}
              threads_per_core_limit: {self.threads_per_core}
              core_count: {self.cores} fpus_per_core: {self.fp32_per_core}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2}
              clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
              name: "{self.name}" device_vendor: "NVIDIA Corporation"
              driver_version: "13.0.0" runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


#: What the figures of XLA's description hold, where that is more than 32 bits.
_MOST = {"memory": 2**63, "bandwidth": 2**63, "l2": 2**63}


def targets(extra: Path | None = None) -> dict[str, Target]:
    """The known targets by key, with those of a file of one's own.

    Raises:
        TargetError: The file cannot be read, or a target in it lacks a figure.
    """
    found = _read(_SHIPPED)
    if extra is not None:
        found.update(_read(extra))
    return found


def target(key: str, extra: Path | None = None) -> Target:
    """The target called ``key``.

    Raises:
        TargetError: There is none of that name.
    """
    known = targets(extra)
    if key not in known:
        raise TargetError(
            f"there is no target {key!r}; there are {', '.join(known)}, "
            "and --targets-file of shapetune check adds others"
        )
    return known[key]


def _read(path: Path) -> dict[str, Target]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetError(f"targets file {str(path)!r} cannot be read: {error}") from error
    return {key: _target(path, key, table) for key, table in tables.items()}


def _target(path: Path, key: str, table: Any) -> Target:
    kinds = {f.name: f.type for f in dataclasses.fields(Target) if f.name != "key"}
    if not isinstance(table, dict) or set(table) != set(kinds):
        raise TargetError(
            f"target {key!r} of {path} must set exactly {', '.join(kinds)}; see targets.toml"
        )
    for name, kind in kinds.items():
        value = table[name]
        wanted = {"str": str, "int": int, "float": int | float}[str(kind)]
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise TargetError(f"target {key!r} of {path}: {name} must be a {kind}, got {value!r}")
        if not isinstance(value, str) and not 0 < value < _MOST.get(name, 2**31):
            raise TargetError(
                f"target {key!r} of {path}: {name} must be positive and below "
                f"{_MOST.get(name, 2**31):.4g}, got {value}"
            )
    if table["capability"] not in CARD_OF_CAPABILITY:
        raise TargetError(
            f"target {key!r} of {path}: capability must be one of "
            f"{', '.join(CARD_OF_CAPABILITY)}, got {table['capability']!r}"
        )
    if not table["name"].isprintable() or set(table["name"]) & set('"\\'):
        raise TargetError(f"target {key!r} of {path}: name must be plain, got {table['name']!r}")
    return Target(key=key, **table)
