"""The `default` dispatcher: which implementation, with which config, serves a call.

Decisions are made once per static shape, at trace time, from the records that
are loaded; nothing is ever tuned or timed here.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..cache import store
from ..cache.errors import ConfigError, ShapetuneError, UntunedError
from ..cache.key import Candidate, Problem, Value
from ..cache.places import Place, as_places, read_path
from ..cache.record_set import RecordSet
from . import misses
from .decision import Decision, Settings, decide
from .device import current_device
from .op import Op, get_op

log = logging.getLogger("shapetune")


class State:
    """Cache places with what was read from them, and the calls prepared so far.

    Attributes:
        places: Where records are read from.
        memo: From the static part of a call to the function that serves it.
        misses: The calls that no record of their own answered.
    """

    def __init__(self, places: Sequence[Place] | None = None) -> None:
        self.places = list(places) if places is not None else read_path()
        self.settings = Settings.from_environment()
        self.memo: dict[Any, Callable[..., Any]] = {}
        self.misses = misses.Counts(self.places)
        self._records: RecordSet | None = None
        self._elsewhere: RecordSet | None = None
        self._decisions: dict[Problem, Decision] = {}
        self._lock = threading.RLock()

    @property
    def records(self) -> RecordSet:
        """The records of this device, read when first needed."""
        with self._lock:
            if self._records is None:
                self._records = store.load(self.places, current_device())
            return self._records

    def elsewhere(self) -> RecordSet:
        """The records of other devices of this platform, read when first needed."""
        with self._lock:
            if self._elsewhere is None:
                here = current_device()
                self._elsewhere = store.load_folders(
                    self.places,
                    lambda name: name.startswith(f"{here.platform}-") and name != here.folder,
                    here,
                )
            return self._elsewhere

    def decide(self, op: Op, problem: Problem) -> Decision:
        """The decision for a problem, made once."""
        with self._lock:
            found = self._decisions.get(problem)
            if found is None:
                found = decide(
                    op, problem, current_device(), self.records, self.settings, self.elsewhere
                )
                self._decisions[problem] = found
            return found

    @property
    def decisions(self) -> dict[Problem, Decision]:
        """What was decided so far."""
        with self._lock:
            return dict(self._decisions)

    def report_miss(self, decision: Decision) -> None:
        """Warns or raises, as the settings say, of a decision that no record supports."""
        if decision.tier != "heuristic" or self.settings.disabled:
            return
        if self.settings.on_miss == "error":
            raise UntunedError(
                f"nothing is tuned for {decision.problem.label} on {current_device().name}, and "
                "SHAPETUNE_ON_MISS=error; run `shapetune tune`, or unset SHAPETUNE_ON_MISS"
            )
        if self.settings.on_miss == "warn":
            log.warning(
                "%s is not tuned; using %s (%s)",
                decision.problem.label, decision.candidate.key, decision.tier,
            )  # fmt: skip


_process_state: State | None = None
_process_lock = threading.Lock()
_scoped: contextvars.ContextVar[State | None] = contextvars.ContextVar("shapetune", default=None)


def state() -> State:
    """The state in force: that of ``use_cache`` if inside one, else the process's."""
    return _scoped.get() or _process_state or _first_state()


def _first_state() -> State:
    global _process_state
    with _process_lock:
        if _process_state is None:
            _process_state = State()
        return _process_state


def load(paths: str | Place | Sequence[str | Place]) -> int:
    """Makes these cache places the process's, and returns how many records they hold.

    Args:
        paths: A folder, a ``.msgpack`` file or the URL of a remote place, or several of them.

    Functions that ``jax.jit`` has traced already keep what they were traced with.

    Raises:
        CacheError: A place is a file of something else, or not a place at all.
    """
    global _process_state
    fresh = State(as_places(paths))
    count = len(fresh.records)
    _process_state = fresh
    return count


def reload() -> int:
    """Reads the cache places in force again, and returns how many records they hold."""
    global _process_state
    scoped = _scoped.get()
    if scoped is not None:
        scoped.__init__(scoped.places)  # type: ignore[misc]
        return len(scoped.records)
    _process_state = State(_process_state.places) if _process_state else State()
    return len(_process_state.records)


@contextlib.contextmanager
def use_cache(paths: str | Place | Sequence[str | Place]) -> Iterator[None]:
    """Dispatches from these cache places inside the ``with`` block, in this thread.

    Raises:
        CacheError: A place is a file of something else, or not a place at all.
    """
    places = as_places(paths)
    for place in places:
        store.check_place(place)
    token = _scoped.set(State(places))
    try:
        yield
    finally:
        _scoped.reset(token)


def prepare(
    op: Op,
    problem: Problem,
    implementation: str,
    config: Mapping[str, Value] | None,
    static: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The function of the op's arrays that serves a call of this problem.

    ``problem`` has mode fwd; ``static`` overrides static arguments that do not
    change which kernel is best, such as a scale. With ``implementation="default"``, the decision of
    mode fwd serves a plain call and that of fwd_bwd a differentiated one.

    Raises:
        UnknownNameError, UnsupportedError, ConfigError: See ``Op.require``.
    """
    training = problem.replace(mode="fwd_bwd")
    if implementation != "default":
        return op.bind(problem, forced(op, training, implementation, config), static)
    if config is not None:
        raise ConfigError(
            f"config={config!r} needs an implementation to belong to; "
            f"name one of {', '.join(sorted(op.implementations))} as implementation=…"
        )
    current = state()
    plain = current.decide(op, problem)
    differentiated = current.decide(op, training)
    current.report_miss(plain)
    plain_function = op.bind(problem, plain.candidate, static)
    if plain.candidate == differentiated.candidate:
        return _with_counts(plain_function, current, plain, differentiated)

    def in_training(*arrays: Any) -> Any:
        current.report_miss(differentiated)
        return trained(*arrays)

    trained = op.bind(training, differentiated.candidate, static)
    chosen = _differently_under_gradient(plain_function, in_training)
    return _with_counts(chosen, current, plain, differentiated)


def _with_counts(
    function: Callable[..., Any], current: State, plain: Decision, training: Decision
) -> Callable[..., Any]:
    """The function, with the counts that ``serve`` adds to where its decisions are misses."""
    if not current.settings.disabled:
        function.counts = (  # type: ignore[attr-defined]
            current.misses.of(plain),
            current.misses.of(training),
        )
    return function


def serve(function: Callable[..., Any], chosen: Callable[..., Any]) -> Callable[..., Any]:
    """What the memo keeps for a call: ``function``, which calls what ``prepare`` chose.

    It is inlined where it is traced: the compiled program holds the chosen call alone.
    """
    inlined = jax.jit(function, inline=True)
    return misses.counted(inlined, *getattr(chosen, "counts", (None, None)))


def forced(
    op: Op, problem: Problem, implementation: str, config: Mapping[str, Value] | None
) -> Candidate:
    """The candidate that a caller asked for by name, its config completed, as far as its
    space lets it, by the default one."""
    device = current_device()
    one = op.implementation(implementation)
    reason = one.supports(problem, device)
    complete = dict(config or {})
    if reason is None:
        defaults = one.default_config(problem, device)
        complete = one.space(problem, device).nearest(complete, defaults)
    candidate = Candidate(implementation, complete)
    op.require(problem, device, candidate)
    return candidate


def _differently_under_gradient(
    plain: Callable[..., Any], differentiated: Callable[..., Any]
) -> Callable[..., Any]:
    """One function that runs ``plain``, or ``differentiated`` where a gradient is taken."""

    @jax.custom_vjp
    def choose(*arrays: Any) -> Any:
        return plain(*arrays)

    choose.defvjp(lambda *arrays: jax.vjp(differentiated, *arrays), lambda vjp, grads: vjp(grads))
    return choose


def explain(op: str, **problem_fields: Any) -> Decision:
    """The decision for a problem, with every step that led to it.

    Args:
        op: Name of the op.
        problem_fields: As of ``Problem.make``: seq, dim, dtype, causal, mode…

    Raises:
        UnknownNameError: No such op.
        ProblemError: A field is out of range.

    Example:
        >>> shapetune.explain("attention", seq=2048, dim=64).tier
        'heuristic'
    """
    get_op(op)
    try:
        problem = Problem.make(op, **problem_fields)
    except TypeError as error:
        raise ShapetuneError(f"explain({op!r}): {error}") from None
    return explain_problem(problem)


def explain_problem(problem: Problem) -> Decision:
    """The decision for a problem, with every step that led to it."""
    current = state()
    op = get_op(problem.op)
    return decide(
        op,
        op.canonical(problem),
        current_device(),
        current.records,
        current.settings,
        current.elsewhere,
    )
