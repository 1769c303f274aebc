"""Does memory stay where it is? Ten thousand cycles of turns that are kept and restored.

.venv/bin/python -m tests.benchmarks.flat [CYCLES]
"""

from __future__ import annotations

import sys
import time

from tests.engine.test_memory import check_flat


def main() -> None:
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    began = time.perf_counter()
    growth = check_flat(cycles)
    seconds = time.perf_counter() - began
    print(f"{cycles} cycles in {seconds:.1f} s: {growth:+d} bytes of active memory")


if __name__ == "__main__":
    main()
