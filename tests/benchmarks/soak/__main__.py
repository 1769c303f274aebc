"""`python -m tests.benchmarks.soak --minutes 60 --output report.json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.benchmarks.soak.run import soak
from tests.benchmarks.soak.scale import full, short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--small", action="store_true", help="the sizes of the test")
    parser.add_argument("--output", type=Path, help="JSON with every number")
    given = parser.parse_args()
    report = soak((short if given.small else full)(given.minutes * 60))
    if given.output is not None:
        given.output.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    print(report.markdown())
    for fault in report.faults():
        print("FAULT", fault)
    sys.exit(1 if report.faults() else 0)


if __name__ == "__main__":
    main()
