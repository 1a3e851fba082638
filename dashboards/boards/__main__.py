"""Writes the dashboards: `cd dashboards && python -m boards [DIRECTORY]`, by default beside this folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from boards import bottleneck, exporter, fleet, job, kernels


def main() -> None:
    """One file for each dashboard, named by its uid."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    for board in (module.build() for module in (bottleneck, fleet, job, kernels, exporter)):
        text = json.dumps(board, indent=2, ensure_ascii=False) + "\n"
        (directory / f"{board['uid']}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
