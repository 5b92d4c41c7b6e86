"""Ops, their implementations, and the spaces of configs that a tuner may search.

To add a kernel of your own to an op, write a function with the op's call
signature plus ``config``, and register an ``Implementation`` for it::

    from shapetune.kernels import Implementation, Space, get_op

    get_op("attention").register(Implementation(
        name="mine",
        function=my_attention,
        version=1,
        space=lambda problem, device: Space({"block": (64, 128, 256)}),
        supports=lambda problem, device: None if not problem.window else "no window",
        default_config=lambda problem, device: {"block": 128},
    ))

From then on it is tuned, verified, recorded and dispatched like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..cache.errors import ConfigError, UnknownNameError, UnsupportedError
from ..cache.key import Candidate, Config, Device, Problem, Value

__all__ = [
    "Candidate",
    "Config",
    "Device",
    "Expected",
    "Implementation",
    "Inputs",
    "Op",
    "Problem",
    "Space",
    "get_op",
    "ops",
    "register_op",
    "yardsticks",
]


@dataclasses.dataclass(frozen=True)
class Space:
    """The configs of one implementation for one problem: named finite choices.

    Attributes:
        choices: For each parameter its values, in order.
        where: Constraints; a config counts only if every one returns True.
    """

    choices: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    where: tuple[Callable[[Config], bool], ...] = ()

    def __iter__(self) -> Iterator[dict[str, Value]]:
        for values in itertools.product(*self.choices.values()):
            config = dict(zip(self.choices, values, strict=True))
            if all(holds(config) for holds in self.where):
                yield config

    def refusal(self, config: Config) -> str | None:
        """Why ``config`` is not in this space, or None if it is."""
        if set(config) != set(self.choices):
            return f"it must set exactly {sorted(self.choices)}, got {sorted(config)}"
        for name, value in config.items():
            # 1 == True == 1.0: compare types too, since configs come from disk.
            if not any(type(value) is type(c) and value == c for c in self.choices[name]):
                return f"{name}={value!r} is not one of {list(self.choices[name])}"
        if not all(holds(config) for holds in self.where):
            return "a constraint of the space does not hold for it"
        return None

    def completed(self, config: Config) -> dict[str, Value]:
        """``config`` with the parameters that it lacks and that have one choice only."""
        only = {name: choices[0] for name, choices in self.choices.items() if len(choices) == 1}
        return {**only, **config}

    def nearest(self, given: Config, wished: Config) -> dict[str, Value]:
        """``wished`` with ``given`` put over it, and one parameter more changed if it must be.

        Where that does not help, the plain combination, which the space refuses.
        """
        plain = {**wished, **given}
        if self.refusal(plain) is None:
            return plain
        for name in [n for n in self.choices if n not in given]:
            for value in reversed(self.choices[name]):
                if self.refusal({**plain, name: value}) is None:
                    return {**plain, name: value}
        return plain

    def fit(self, config: Config) -> dict[str, Value]:
        """A config of a neighbouring problem moved into this space: each number
        becomes the largest choice that does not exceed it, else the smallest."""
        fitted = dict(config)
        for name, choices in self.choices.items():
            value = config.get(name)
            numbers = [c for c in choices if isinstance(c, int)]
            if isinstance(value, int) and numbers and value not in numbers:
                below = [c for c in numbers if c <= value]
                fitted[name] = max(below) if below else min(numbers)
        return fitted


def _no_space(problem: Problem, device: Device) -> Space:
    return Space()


def _no_config(problem: Problem, device: Device) -> Config:
    return {}


def _always(problem: Problem, device: Device) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: Unique within the op.
        function: Takes the op's arrays by position, then by keyword the op's
            static arguments and ``config``.
        version: Raised whenever the speed or the result can change; records
            of another version are stale.
        space: The configs worth trying, by problem and device. Empty for an
            implementation without parameters.
        supports: Why it cannot serve a problem on a device, or None.
        default_config: The config to use where nothing is tuned.
        own_gradient: It defines its own backward pass (``custom_vjp``), so
            forward-mode differentiation is not available.
        automatic: Whether the tuner and the dispatcher consider it unasked.
    """

    name: str
    function: Callable[..., Any]
    version: int = 1
    space: Callable[[Problem, Device], Space] = _no_space
    supports: Callable[[Problem, Device], str | None] = _always
    default_config: Callable[[Problem, Device], Config] = _no_config
    own_gradient: bool = False
    automatic: Callable[[Problem, Device], bool] = lambda problem, device: True

    def refusal(self, problem: Problem, device: Device, config: Config) -> str | None:
        """Why this implementation with ``config`` cannot serve, or None."""
        return self.supports(problem, device) or self.space(problem, device).refusal(config)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays to run a problem on.

    Attributes:
        arrays: The op's arrays by position; None where an optional one is absent.
        names: Their names.
        differentiable: Positions that get a gradient in mode fwd_bwd.
        weights: One fixed float32 array for each output; the loss of fwd_bwd
            is the sum over outputs of sum(output · weight).
    """

    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    differentiable: tuple[int, ...]
    weights: tuple[Any, ...]

    def on_host(self) -> Inputs:
        """The same as NumPy arrays, of which a part is taken without a compiled program."""
        arrays, weights = (
            tuple(None if one is None else np.asarray(one) for one in some)
            for some in (self.arrays, self.weights)
        )
        return dataclasses.replace(self, arrays=arrays, weights=weights)


@dataclasses.dataclass(frozen=True)
class Expected:
    """A float64 slice that an output must agree with.

    Attributes:
        output: Name of the output: one of ``Op.outputs``, or ``"grad_"`` and
            the name of an input.
        index: Index into that output.
        value: The right values there, float64.
        condition: How much the rounding of a float32 intermediate is amplified:
            exp(s) has a relative error of |s| times that of s, so the largest
            score in absolute value; and where terms cancel, their magnitudes
            over what is left.
    """

    output: str
    index: tuple[Any, ...]
    value: Any
    condition: float = 0.0


def yardsticks(expected: Sequence[Expected]) -> list[float]:
    """What the error of each slice is relative to: its largest right value.

    Where the right values cancel to nearly nothing, such as the gradient of a
    query that sees one key, a hundredth of the largest right value of all
    slices stands in for them: what is left there is the rounding of the terms.
    """
    largest = [float(abs(one.value).max(initial=0.0)) for one in expected]
    least = 1e-2 * max(largest) or 1.0
    return [max(own, least) for own in largest]


@dataclasses.dataclass
class Op:
    """A mathematical operation, and the ways to compute it.

    Attributes:
        name: Unique among ops.
        outputs: Names of the outputs, in order.
        static: The static keyword arguments of a call, from a problem.
        make_inputs: ``make_inputs(problem, seed, kind)`` gives ``Inputs``; the
            kinds are ``"normal"`` and the names in ``hard_inputs``.
        expect: ``expect(problem, inputs, slices)`` gives the float64 reference
            on a few slices of the inputs: outputs, and in mode fwd_bwd the
            gradients too.
        flops: Floating-point operations of a problem, counted analytically.
        traffic: Bytes that must move at least: inputs read, outputs written.
        heuristic: The candidate used where nothing is tuned.
        baseline: Name of the plain implementation whose own error sets the
            tolerance of verification.
        hard_inputs: Kinds of harder inputs, tried before a record is published.
        shapes: ``shapes(problem)`` gives ``Inputs`` that hold shapes and dtypes in
            place of arrays; derived from ``make_inputs`` if None.
        canonical: A problem that a person described, as a call would make it.
    """

    name: str
    outputs: tuple[str, ...]
    static: Callable[[Problem], dict[str, Any]]
    make_inputs: Callable[[Problem, int, str], Inputs]
    expect: Callable[[Problem, Inputs, int], Sequence[Expected]]
    flops: Callable[[Problem], float]
    traffic: Callable[[Problem], float]
    heuristic: Callable[[Problem, Device], Candidate]
    baseline: str
    hard_inputs: tuple[str, ...] = ()
    shapes: Callable[[Problem], Inputs] | None = None
    canonical: Callable[[Problem], Problem] = lambda problem: problem
    implementations: dict[str, Implementation] = dataclasses.field(default_factory=dict)

    def register(self, implementation: Implementation) -> Implementation:
        """Adds (or replaces) an implementation of this op."""
        self.implementations[implementation.name] = implementation
        return implementation

    def implementation(self, name: str) -> Implementation:
        """The implementation called ``name``.

        Raises:
            UnknownNameError: There is none of that name.
        """
        try:
            return self.implementations[name]
        except (KeyError, TypeError):
            known = ", ".join(sorted(self.implementations))
            raise UnknownNameError(
                f"{self.name} has no implementation {name!r}; it has: default, {known}"
            ) from None

    def abstract_inputs(self, problem: Problem) -> Inputs:
        """The inputs of a problem as ``jax.ShapeDtypeStruct``, for compiling alone."""
        if self.shapes is not None:
            return self.shapes(problem)
        made = self.make_inputs(problem, 0, "normal")

        def shaped(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays
            )

        return dataclasses.replace(made, arrays=shaped(made.arrays), weights=shaped(made.weights))

    def usable(self, problem: Problem, device: Device) -> dict[str, Implementation]:
        """The implementations that may be chosen for a problem without being asked for."""
        return {
            name: one
            for name, one in self.implementations.items()
            if one.automatic(problem, device) and one.supports(problem, device) is None
        }

    def defaults(self, problem: Problem, device: Device) -> list[Candidate]:
        """The default of each usable implementation; the baseline's first, then by name."""
        usable = self.usable(problem, device)
        names = sorted(usable, key=lambda name: (name != self.baseline, name))
        return [Candidate(n, dict(usable[n].default_config(problem, device))) for n in names]

    def require(self, problem: Problem, device: Device, candidate: Candidate) -> Implementation:
        """The implementation of a candidate that was asked for by name.

        Raises:
            UnknownNameError: No such implementation.
            UnsupportedError: It cannot do this problem on this device.
            ConfigError: The config is not in its space.
        """
        one = self.implementation(candidate.implementation)
        reason = one.supports(problem, device)
        if reason is not None:
            raise UnsupportedError(
                f"implementation={one.name!r} cannot do {problem.label}: {reason}; "
                'use implementation="default" to have one chosen that can'
            )
        reason = one.space(problem, device).refusal(candidate.config)
        if reason is not None:
            raise ConfigError(
                f"config={dict(candidate.config)!r} does not fit {one.name!r}: {reason}"
            )
        return one

    def bind(
        self,
        problem: Problem,
        candidate: Candidate,
        overrides: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """The candidate as a function of the op's arrays alone.

        ``overrides`` replaces static arguments that the problem leaves open.
        """
        function = self.implementation(candidate.implementation).function
        static = {**self.static(problem), **(overrides or {})}
        config = dict(candidate.config)

        def bound(*arrays: Any) -> Any:
            return function(*arrays, **static, config=config)

        bound.__name__ = candidate.implementation
        return bound


_OPS: dict[str, Op] = {}


def register_op(op: Op) -> Op:
    """Makes an op known by its name."""
    _OPS[op.name] = op
    return op


def ops() -> dict[str, Op]:
    """The registered ops by name."""
    return dict(_OPS)


def get_op(name: str) -> Op:
    """The op called ``name``.

    Raises:
        UnknownNameError: There is none of that name.
    """
    try:
        return _OPS[name]
    except (KeyError, TypeError):
        raise UnknownNameError(
            f"there is no op {name!r}; the ops are: {', '.join(sorted(_OPS))}"
        ) from None
