"""Time in which the mask of secrets looks through long lines that are made to be hard for its patterns, and through ordinary lines.

python -m tests.baselines.bench_masking
"""

import argparse
import sys
import time

from tests.hard_lines import HARD
from undula.masking.values import declare, mask

LINE = "step 120 loss 2.3412 lr 0.0003 tokens/s 12000 grad_norm 1.2"


def seconds(text: str) -> float:
    begin = time.process_time()
    mask(text)
    return time.process_time() - begin


def of_length(piece: str, length: int) -> str:
    return piece * (length // len(piece) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chars", type=int, default=1_000_000, help="characters of a line")
    chars = parser.parse_args().chars
    declare({"PHRASE": "open-sesame"})
    for name, piece in HARD.items():
        text = of_length(piece, chars)
        print(f"{name:40} {min(seconds(text) for _ in range(3)):8.3f} s")
        sys.stdout.flush()
    begin = time.process_time()
    for _ in range(10_000):
        mask(LINE)
    print(f"{'an ordinary line':40} {(time.process_time() - begin) * 100:8.1f} us")


if __name__ == "__main__":
    main()
