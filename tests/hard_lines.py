"""Lines that are made to be hard for the patterns of the mask of secrets."""

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
