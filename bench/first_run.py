"""What `make tune` does: tunes a handful of shapes on this machine, then uses them."""

from __future__ import annotations

import sys

import click
import jax

from .. import attention
from ..autotune import grid
from ..cache.key import Problem
from ..cli import main as command
from ..kernels import default, get_op
from .side_by_side import speedups

#: Per platform the options of the run: small enough for three minutes.
_RUNS = {
    "cpu": {"seq": "512,2048", "dim": "64", "dtype": "float32", "batch": "1", "heads": "8"},
    "gpu": {"seq": "1024,4096", "dim": "128", "dtype": "bfloat16", "batch": "4", "heads": "16"},
}
_SEARCH = ["--causal", "both", "--trials", "24", "--budget", "10s"]


def main() -> None:
    """Tunes, prints the table, and shows the dispatcher using it."""
    run = _RUNS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    options = [part for name, value in run.items() for part in (f"--{name}", value)]
    for mode, more in (("fwd", []), ("fwd_bwd", ["--seq", run["seq"].split(",")[0]])):
        line = ["tune", "attention", *options, *more, *_SEARCH, "--mode", mode]
        click.echo(f"$ shapetune {' '.join(line)}", err=True)
        try:
            command(line, standalone_mode=False)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
    problems = grid(
        "attention",
        seq=[int(n) for n in run["seq"].split(",")],
        dim=[int(run["dim"])],
        dtype=[run["dtype"]],
        causal=[False, True],
        batch=[int(run["batch"])],
        heads=[int(run["heads"])],
    )
    click.echo("\nshapetune.attention(q, k, v) now, timed in turns with jax.nn.dot_product_attention:")
    for problem in problems:
        click.echo(f"  {_line(problem)}")


def _line(problem: Problem) -> str:
    inputs = get_op("attention").make_inputs(problem, 0, "normal")
    query, key, value = inputs.arrays[:3]
    ratio, low, high = speedups(
        lambda *a: jax.nn.dot_product_attention(*a, is_causal=problem.causal),
        lambda *a: attention(*a, is_causal=problem.causal),
        (query, key, value),
    )
    decision = default.explain_problem(problem)
    return (
        f"{problem.label}: {ratio:.2f}× [{low:.2f}, {high:.2f}] as fast, by "
        f"{decision.candidate.key} (tier {decision.tier})"
    )


if __name__ == "__main__":
    main()
