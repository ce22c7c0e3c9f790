"""Time in which the mask of secrets looks through long lines that are made to be hard for its patterns, and through ordinary lines.

python -m tests.baselines.bench_masking
"""

import argparse
import sys
import time

from undula.masking.values import declare, mask

HARD = {
    "tokens of JWT without an end": "eyJ-", "tokens of JWT in two parts": "eyJaaaaaaaa.", "short tokens": "sk-",
    "tokens of no service": "sk-a", "flags": "--a ", "flags without a value": "--token -", "variables": "A_B ",
    "variables of secrets": "A_TOKEN 1 ", "keys without an end": "-----BEGIN PRIVATE KEY-----",
    "beginnings of keys": "-----BEGIN A", "dashes": "-", "URLs": "://a:", "URLs with @": "://a:@",
    "URLs with users": "https://a", "ports": "http://a:1/", "commands": "curl ", "commands with users": "curl -u a",
    "base64": "aB3/", "short base64": "aB3/ ", "lines of keys": "aB3dE6gH" * 8 + " ", "blanks": " ", "one word": "a",
    "numbers": "1", "lists": "['a', 'b'], ", "assignments": "a=", "assignments of keys": "key=",
    "assignments of keys with numbers": "key=1", "settings": "key: ", "settings with numbers": "token: 12 ",
    "passwords": "password=a ", "empty quotes": "password='' ", "quoted words": "token='a b ",
    "JSON": '{"token": "the", "id": 3}, ', "elements": "<password>", "open brackets": "password=<",
    "headers": "Bearer ", "headers of HTTP": "Authorization: Token ", "machines": "machine ", "signatures": "?sig=",
    "webhooks": "hooks.slack.com/", "colours": "\x1b[1m", "coloured letters": "\x1b[1ma",
    "declared values": "open-sesame", "halves of declared values": "open-", "times": "12345678:",
    "lines": "password\n", "carriage returns": "10%\r",
}  # fmt: skip
"""Pieces that are repeated in a line."""
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
