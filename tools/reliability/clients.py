"""Clients of `kvpatch serve` for some minutes, well and badly behaved: errors, the slope of its memory, and equal answers.

    python -m tools.reliability.clients .models/smollm2 --clients 8 --minutes 15 [--keep-conversations 64MiB] [--edits]

Each client draws what it does: short questions, prompts as long as the model takes, conversations that go on, whose old turns
are dropped at times, streams that it hangs up in the midst, and malformed requests. Before and after, 20 prompts are asked
alone, whose answers must be those of generate() under the same patch. The server is a process of its own. Resident memory is
looked at every two seconds; its slope is of all but the first fifth. An error is a status of 500 or more, a good request that
is refused, a malformed one that is not, another answer than generate()'s, or a request that the engine still runs at the end.
Any error makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from tools.bench.memory import find_slope, measure_resident

PAGES = Path(__file__).parents[1] / "evidence" / "texts" / "pages.txt"
EVERY, NEW, LONGEST, TURNS = 2.0, 16, 400, 8  # seconds; tokens of an answer; words of a prompt; turns of a conversation
EQUAL = 20  # prompts whose answers are compared
MALFORMED: tuple[Any, ...] = (
    b"{not json",
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user", "content": "a"}], "n": 3},
    {"messages": [{"role": "user", "content": "a"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "a"}], "nonsense": 1},
    {"messages": [{"role": "user", "content": "a " * 200_000}]},
)


class Load:
    """What the clients of a server do, and what comes of it: counts by kind, and errors in words."""

    def __init__(self, address: str, model: str, until: float, drops: bool) -> None:
        self.address, self.model, self.until, self.drops = address, model, until, drops
        self.words = PAGES.read_text(encoding="utf-8").split()
        self.counts, self.errors, self._lock = Counter[str](), list[str](), Lock()

    def note(self, kind: str, error: str | None = None) -> None:
        """Count a request; error: what went wrong with it."""
        with self._lock:
            self.counts[kind] += 1
            if error is not None:
                self.errors.append(f"{kind}: {error}")

    def send(self, body: Any, timeout: float = 300) -> Any:
        """Send a chat, and return the open answer."""
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"{self.address}/v1/chat/completions", data, headers), timeout=timeout
        )

    def ask(self, kind: str, messages: list[dict[str, str]], **fields: Any) -> str | None:
        """Ask for an answer and count it; None if there is none."""
        try:
            found = json.loads(self.send({"messages": messages, "max_tokens": NEW, **fields}).read())
        except OSError as error:
            self.note(kind, f"{error}")
            return None
        self.note(kind)
        with self._lock:
            self.counts["tokens not read again"] += (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return found["choices"][0]["message"]["content"] or ""

    def cut(self, rnd: random.Random, count: int) -> str:
        """Return so many words of the pages."""
        first = rnd.randrange(len(self.words) - count)
        return " ".join(self.words[first : first + count])

    # ---- what a client does ----

    def ask_briefly(self, rnd: random.Random) -> None:
        self.ask("short", [user(self.cut(rnd, 8))], temperature=rnd.choice([0.0, 1.0]), seed=rnd.randrange(100))

    def ask_at_length(self, rnd: random.Random) -> None:
        self.ask("long", [user(self.cut(rnd, LONGEST))])

    def go_on(self, rnd: random.Random) -> None:
        """Hold a conversation, whose first turns are dropped at times."""
        messages: list[dict[str, str]] = []
        for _ in range(rnd.randrange(2, TURNS)):
            if time.monotonic() > self.until:
                return
            if self.drops and len(messages) > 4 and rnd.random() < 0.3:
                del messages[:2]
            messages.append(user(self.cut(rnd, rnd.randrange(4, 60))))
            said = self.ask("conversation", messages)
            if said is None:
                return
            messages.append({"role": "assistant", "content": said})

    def hang_up(self, rnd: random.Random) -> None:
        """Leave in the midst of an answer, whether it streams or not."""
        streams = rnd.random() < 0.7
        body = {"messages": [user(self.cut(rnd, 30))], "max_tokens": 200, "stream": streams}
        try:
            with self.send(body, timeout=300 if streams else rnd.uniform(0.05, 1)) as answer:
                if streams:
                    answer.read(rnd.randrange(1, 600))
        except TimeoutError:
            pass
        except OSError as error:
            if not isinstance(getattr(error, "reason", None), TimeoutError):
                self.note("hung up", f"{error}")
                return
        self.note("hung up")

    def blunder(self, rnd: random.Random) -> None:
        """Send what must be refused with a status of 400 to 499."""
        try:
            self.send(rnd.choice(MALFORMED)).read()
            self.note("malformed", "it was answered")
        except urllib.error.HTTPError as error:
            self.note("malformed", None if 400 <= error.code < 500 else f"{error}")
        except OSError as error:
            self.note("malformed", f"{error}")

    def work(self, seed: int) -> None:
        """Do one thing after the other until the time is over."""
        rnd = random.Random(seed)
        deeds = (self.ask_briefly, self.ask_at_length, self.go_on, self.go_on, self.hang_up, self.hang_up, self.blunder)
        while time.monotonic() < self.until:
            rnd.choice(deeds)(rnd)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@contextmanager
def serve(model: str, options: list[str]) -> Iterator[tuple[int, str]]:
    """Start a server; yields the id of its process, and its address."""
    with socket.socket() as held:  # while the server runs: nobody else gets its port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
        command = [sys.executable, "-m", "kvpatch", "serve", model, "--port", str(port), "--device", "cpu", *options]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            for _ in range(600):
                with suppress(OSError):
                    urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
                    break
                if process.poll() is not None:
                    raise SystemExit(f"the server does not start: {' '.join(command)}")
                time.sleep(0.2)
            yield process.pid, f"http://localhost:{port}"
        finally:
            process.terminate()
            process.wait(60)


def count_running(address: str) -> float:
    """Return how many requests the engine of a server has."""
    lines = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode().splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith(("kvpatch_requests_running", "kvpatch_requests_waiting"))
    )


def generate(given: argparse.Namespace, texts: list[list[dict[str, str]]]) -> list[str]:
    """Return what generate() answers to each text, under the server's patch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvpatch

    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model).float(), AutoTokenizer.from_pretrained(given.model)
    answers = list[str]()
    with kvpatch.patched(model, given.policy, given.k), torch.no_grad():
        for text in texts:
            told = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            output = model.generate(**told, max_new_tokens=NEW, do_sample=False)[0, told["input_ids"].shape[1] :]
            answers.append(tokenizer.decode(output, skip_special_tokens=True))
    return answers


def compare(load: Load, when: str, texts: list[list[dict[str, str]]], expected: list[str]) -> None:
    """Ask for each text alone; another answer than the expected one is an error."""
    for text, answer in zip(texts, expected, strict=True):
        said = load.ask(f"alone, {when}", text, temperature=0.0)
        if said != answer:
            load.errors.append(f"{when} {said!r} in place of {answer!r}")


def run(process: int, address: str, given: argparse.Namespace) -> Load:
    """Let the clients loose on a server; returns what came of it."""
    load = Load(address, given.model, 0.0, given.edits)
    texts = [[user(load.cut(random.Random(seed), 40 + 12 * seed))] for seed in range(EQUAL)]
    expected = generate(given, texts)
    compare(load, "before", texts, expected)
    began = time.monotonic()
    load.until = began + 60 * given.minutes
    threads = [Thread(target=load.work, args=(given.seed + number,)) for number in range(given.clients)]
    for thread in threads:
        thread.start()
    points = list[tuple[float, int]]()
    while any(thread.is_alive() for thread in threads):
        points.append((time.monotonic() - began, measure_resident(process)))
        time.sleep(EVERY)
    for _ in range(100):
        if not count_running(address):
            break
        time.sleep(0.1)
    else:
        load.errors.append("the engine still has requests that nobody waits for")
    compare(load, "afterwards", texts, expected)
    each = points[:: max(len(points) // 15, 1)]
    print("memory, MiB: " + ", ".join(f"{size / 2**20:.0f} ({at / 60:.1f} min)" for at, size in each))
    print(f"slope of its last four fifths: {find_slope(points, 0.2) * 60 / 1e6:+.2f} MB a minute")
    return load


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", default="256")
    parser.add_argument("--keep-conversations", default="64MiB", help="0 for none")
    parser.add_argument("--edits", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = ["--policy", given.policy, "-k", given.k, "--dtype", "float32", "--memory", "0.1"]
    options += [] if given.keep_conversations == "0" else ["--keep-conversations", given.keep_conversations]
    with serve(given.model, options + ["--edits"] * given.edits) as (process, address):
        load = run(process, address, given)
        health = json.loads(urllib.request.urlopen(f"{address}/health", timeout=60).read())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(load.counts.items())))
    print(f"health: {health}\n{len(load.errors)} errors", *load.errors[:20], sep="\n")
    return bool(load.errors)


if __name__ == "__main__":
    sys.exit(main())
