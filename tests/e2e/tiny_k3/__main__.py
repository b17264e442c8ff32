"""python -m tiny_k3 FORM FOLDER: write the target, or with drafter-FORM a drafter."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import DRAFTER_FORMS, FORMS, write_drafter, write_target

DRAFTER = "drafter-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny_k3", description="Write a tiny Kimi-K3 checkpoint.")
    forms = [*FORMS, *(DRAFTER + form for form in DRAFTER_FORMS)]
    parser.add_argument("form", metavar="FORM", choices=forms, help=f"one of {', '.join(forms)}")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-only", action="store_true", help="the text model KimiLinearForCausalLM alone")
    chosen = parser.parse_args()
    if chosen.form.startswith(DRAFTER):
        write_drafter(chosen.folder, chosen.form.removeprefix(DRAFTER), seed=chosen.seed)
    else:
        write_target(chosen.folder, chosen.form, seed=chosen.seed, outer=not chosen.text_only)


if __name__ == "__main__":
    main()
