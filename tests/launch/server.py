"""A stand-in for an engine: a real process with a child in its own process group, log lines and an HTTP port.

argv after the options is free; `--dump FILE` writes sys.argv and os.environ there as JSON, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until it serves")
    parser.add_argument("--crash", help="print this and end with code 3")
    parser.add_argument("--child", action="store_true", help="a child in its own process group")
    parser.add_argument("--session-child", action="store_true", help="a child in its own session")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--exit-after", type=float, help="end with code 4 after so many seconds of serving")
    parser.add_argument("--dump")
    options, _ = parser.parse_known_args()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.dump:
        dump(options.dump)
    if options.child:
        subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
    if options.session_child:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    load(options.delay)
    if options.crash is not None:
        print(options.crash, file=sys.stderr, flush=True)
        sys.exit(3)
    serve(options.port, options.exit_after)


def dump(path: str) -> None:
    """Only ASCII and no line of source in between: argv and environment as the kernel handed them over."""
    argv = [os.fsencode(word).hex() for word in sys.argv]
    environ = {name.hex(): value.hex() for name, value in os.environb.items()}
    with open(path + ".part", "w") as file:
        json.dump({"argv": argv, "environ": environ, "cwd": os.getcwd()}, file)
    os.replace(path + ".part", path)


def load(seconds: float) -> None:
    for percent in (0, 50, 100):
        print(f"Loading safetensors checkpoint shards: {percent:3d}% Completed", end="\r", file=sys.stderr, flush=True)
        time.sleep(seconds / 3)
    print(file=sys.stderr, flush=True)


def serve(port: int, seconds: float | None) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", port), Health)
    server.timeout = 0.1
    end = time.monotonic() + (seconds if seconds is not None else 1e9)
    while time.monotonic() < end:
        server.handle_request()
    print("the end", flush=True)
    sys.exit(4)


if __name__ == "__main__":
    main()
