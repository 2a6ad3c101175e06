"""Request bodies that the server must refuse with a 400, by what is wrong with them, and some that are only odd."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.serve.made import user


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": user("Hi"), "max_tokens": 4, "temperature": 0, **fields}).encode()


def schema(value: object) -> bytes:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return chat(response_format=shape)


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}}
    return made


def exponential(depth: int) -> dict[str, Any]:
    """Short to write, long when every reference is followed."""
    names = [f"d{n}" for n in range(depth)]
    defs: dict[str, Any] = {
        name: {"type": "object", "properties": {p: {"$ref": f"#/$defs/{below}"} for p in "abcdefgh"}}
        for name, below in itertools.pairwise(names)
    }
    return {"$defs": defs | {names[-1]: {"type": "string"}}, "$ref": "#/$defs/d0"}


JSON: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "half of it": chat()[:-9],
    "two of them": chat() * 2,
    "a list": b"[1]",
    "a number": b"5",
    "not UTF-8": chat()[:-1] + b',"user":"\xff\xfe"}',
    "UTF-16": chat().decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + chat(),
    "a NUL": b"\x00" + chat(),
    "NaN": chat()[:-1] + b',"top_p":NaN}',
    "infinity by digits": chat()[:-1] + b',"top_p":1e999}',
    "too many digits": chat()[:-1] + b',"seed":' + b"9" * 6000 + b"}",
    "half a character": chat()[:-1] + b',"user":"\\ud800"}',
    "a name twice": chat()[:-1] + b',"n":1,"n":2}',
    "lists without end": b"[" * 200_000,
    "objects without end": b'{"a":' * 100_000,
    "deep": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
}
FIELDS: dict[str, dict[str, Any]] = {
    "messages of a text": {"messages": "Hi"},
    "no messages": {"messages": []},
    "a message of numbers": {"messages": [1, 2]},
    "a foreign role": {"messages": [{"role": "king", "content": "Hi"}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "max_tokens of a text": {"max_tokens": "4"},
    "max_tokens of a fraction": {"max_tokens": 4.5},
    "no tokens": {"max_tokens": 0},
    "too many tokens": {"max_tokens": 2**40},
    "a hot temperature": {"temperature": 1e9},
    "a temperature of a truth": {"temperature": True},
    "stream of a text": {"stream": "yes"},
    "many choices": {"n": 100_000},
    "a seed beyond 64 bits": {"seed": 2**80},
    "a bias of a word": {"logit_bias": {"cat": 1}},
    "a bias beyond the vocabulary": {"logit_bias": {"99999999": 1}},
    "a stop id beyond the vocabulary": {"stop_token_ids": [2**31 - 1]},
    "a long stop string": {"stop": "x" * 20_000},
    "many stop strings": {"stop": ["x"] * 1000},
    "empty stop strings": {"stop": [""]},
    "an unknown field": {"__proto__": {}},
    "a foreign format": {"response_format": {"type": "xml"}},
    "a foreign budget": {"speculation": {"budget": -1}},
    "tools that are none": {"tools": [{"type": "function"}]},
}
SCHEMAS: dict[str, Any] = {
    "a type that is none": {"type": "banana"},
    "a schema of a number": 5,
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
    "a reference to the network": {"$ref": "http://127.0.0.1:9/x.json"},
    "a reference to itself": {"$ref": "#"},
    "a pattern that is none": {"type": "string", "pattern": "(["},
    "nested beyond JSON's depth": nested(400),
    "an impossible range": {"type": "integer", "minimum": 5, "maximum": 1},
    "a huge count": {"type": "string", "minLength": 10**9},
    "many huge counts": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
}
# Allowed, and more than any answer will ever hold.
COUNTS: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {"type": "array", "maxItems": 10_000, "items": {"type": "string", "minLength": 10_000}},
}

# Whole bodies of completions: within the limit of bytes, and far beyond everything else.
HUGE: dict[str, bytes] = {
    "a prompt of 7 MB": json.dumps({"prompt": "word " * 1_400_000}).encode(),
    "a prompt of one word": json.dumps({"prompt": "a" * 7_000_000}).encode(),
    "a token too many": json.dumps({"prompt": [5] * 2048}).encode(),
    "a million token ids": json.dumps({"prompt": [5] * 1_000_000}).encode(),
    "a million prompts": json.dumps({"prompt": ["a"] * 1_000_000}).encode(),
    "two million lists": b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}",
    "a token id beyond the vocabulary": json.dumps({"prompt": [2**31 - 1]}).encode(),
    "unknown fields without end": json.dumps({f"f{n}": n for n in range(300_000)}).encode(),
    "biases without end": json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(49_000)}}).encode(),
}

# Not even HTTP, or HTTP that two readers would cut in two ways.
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
RUBBISH: dict[str, bytes] = {
    "a TLS hello": bytes.fromhex("160301020001000001fc0303") + bytes(200),
    "noise": bytes(range(256)) * 8 + b"\r\n\r\n",
    "no method": b" / HTTP/1.1\r\n\r\n",
    "an endless path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "an endless header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "a length in words": HEAD + b"Content-Length: five\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
    "a chunk of no number": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "a way out of the folder": b"GET /page/../../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "an encoded way out": b"GET /%2e%2e%2f%2e%2e%2fetc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}
