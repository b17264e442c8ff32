"""`vllm serve` of the stand-in: completions from its table.  FAKE_VLLM: ``wrong`` answers after a reload, or ``loses``
tokens of some."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import vllm


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seed = 0
    asked = 0

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            Handler.seed = 1 if "wrong" in vllm.FAULTS else 0
            self.answer({"results": [None]})
        elif self.path == "/v1/chat/completions":
            usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"], "total_tokens": 9}
            choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "x"}}
            self.answer(
                {
                    "id": "0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                    "usage": usage,
                }
            )
        elif body.get("stream"):
            self.stream()
        else:
            self.complete(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chunk = {
            "id": "0",
            "object": "text_completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "text": "x"}],
        }
        for _ in range(1000):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            time.sleep(0.05)

    def complete(self, body: Any) -> None:
        Handler.asked += 1
        count = body["max_tokens"] - (3 if "loses" in vllm.FAULTS and Handler.asked % 50 == 0 else 0)
        tokens: list[int] = []
        values, top = [], []
        for _ in range(count):
            row = vllm.row((body["prompt"] + tokens)[-1], Handler.seed)
            best = row.argsort()[::-1][: body["logprobs"]]
            tokens.append(int(best[0]))
            values.append(float(row[best[0]]))
            top.append({f"token_id:{i}": float(row[i]) for i in best})
        logprobs = {"token_logprobs": values, "top_logprobs": top, "tokens": list(map(str, tokens)), "text_offset": []}
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs, "token_ids": tokens}
        self.answer({"id": "0", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})


class Server(ThreadingHTTPServer):
    request_queue_size = 256


def main() -> None:
    arguments = sys.argv[1:]
    assert arguments[0] == "serve"
    print("Starting to load model", flush=True)
    files = list(Path(arguments[1]).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no weights in {arguments[1]}")
    if any(file.stat().st_size == 0 for file in files):
        time.sleep(3600)
    Server(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
