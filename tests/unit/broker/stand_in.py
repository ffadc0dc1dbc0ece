"""Stand-ins for programs that code starts."""

from __future__ import annotations

from pathlib import Path


def stand_in(program: Path, body: str, **options: str) -> None:
    """Writes a shell script in place of a program.

    Args:
        body: what it does.
        options: by variable of the script the option whose value it has, as in --option=value.
    """
    cases = " ".join(f"{option}=*) {variable}=${{a#*=}};;" for variable, option in options.items())
    program.write_text(f'#!/bin/sh\nfor a in "$@"; do case $a in {cases} esac; done\n{body}\n')
    program.chmod(0o755)
