"""The command `shapetune`: its commands are in the folder of that name."""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from ._version import __version__
from .cache.errors import ShapetuneError
from .commands import asking, bench, cache, report, tuning


class _Group(click.Group):
    """Turns the package's own errors into one clear line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        # A name that is no text, or a terminal without ×, is no reason to fail.
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except ShapetuneError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shapetune")
def main() -> None:
    """Picks the fastest verified kernel and block sizes for every shape."""


for _command in (
    tuning.tune,
    asking.show,
    asking.explain,
    asking.doctor,
    asking.misses,
    cache.cache,
    tuning.check,
    tuning.demo,
    bench.bench,
    bench.compare,
    report.report,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
