"""Asks a server for a bit of everything for minutes, while its pool has half the pages it needs.

    python -m scripts.server.soak --minutes 20 --requests 5000

Prompts carry a mark, and what each is answered alone, before, is what it must be answered under
load, whoever else is served, preempted or gone: so no answer is lost or another's. Some clients go
away early, some send nonsense; who is told that there are too many comes again. At the end the
server is told to end while texts run. Checked: every request has the status and the text that it
should have, no 5xx but 503 then, all pages come back, and the server's memory does not grow.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

import jkvq
from jkvq.bench.serving.traffic import Load, Scenario
from jkvq.calibration.prose import default_text
from jkvq.server.server import Server, bind

COMPLETIONS = "/v1/completions"
LONGEST_PAUSE = 16  # times what the server says, of clients that come again and again
GROWTH = 1.05  # of the memory, from the second quarter of the time to the last
WAYS = {"whole": 45, "stream": 25, "leave in a stream": 12, "leave": 8, "nonsense": 10}
NONSENSE: list[tuple[str, Any]] = [
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"\xff\xfe"),
    (COMPLETIONS, []),
    (COMPLETIONS, {"prompt": 5}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}),
    (COMPLETIONS, {"prompt": "x", "model": "another"}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "x " * 100_000}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/nothing", {}),
]


@dataclasses.dataclass(frozen=True)
class Marked:
    """A request whose answer is known."""

    body: dict[str, Any]
    text: str


def bodies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Requests, each with a mark; a third of them begin alike before it."""
    rng, prose = random.Random(args.seed), default_text()
    for number in range(args.prompts):
        start, letters = rng.randrange(100_000), rng.randrange(4, args.longest)
        text = f"[{number:04}] {prose[start : start + letters]}"
        yield {
            "prompt": prose[: args.longest // 2] + text if number % 3 == 0 else text,
            "max_tokens": rng.randint(1, args.tokens),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": number,
        }


class Soak:
    """One run, and what went wrong in it."""

    def __init__(self, args: argparse.Namespace, url: str, session: aiohttp.ClientSession):
        self.args, self.url, self.session = args, url, session
        self.rng = random.Random(args.seed)
        self.marked: list[Marked] = []
        self.echoes = True  # unless the server has no echo
        self.outcomes: Counter[str] = Counter()
        self.sent_away = 0  # how often somebody was told to come again
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Asks for everything alone."""
        for body in bodies(self.args):
            self.marked.append(Marked(body, await self.text(body)))
        try:
            await self.text({**self.marked[0].body, "echo": True})
        except _Status as error:
            self.echoes = error.status != 400

    async def text(self, body: dict[str, Any]) -> str:
        async with self.session.post(self.url + COMPLETIONS, json=body) as answer:
            if answer.status != 200:
                raise await _status(answer)
            return (await answer.json())["choices"][0]["text"]

    async def streamed(self, body: dict[str, Any], events: int | None = None) -> str:
        """The text of a stream, or of its first events, after which the client goes."""
        pieces: list[str] = []
        sent = {**body, "stream": True}
        async with self.session.post(self.url + COMPLETIONS, json=sent) as answer:
            if answer.status != 200:
                raise await _status(answer)
            async for line in answer.content:
                if events is not None and len(pieces) >= events:
                    answer.close()
                    return ""
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _Status(500, event)
                    pieces += [choice["text"] for choice in event["choices"]]
                elif line.startswith(b"data: [DONE]"):
                    return "".join(pieces)
        raise _Status(0, {"error": {"message": "the stream broke off"}})

    async def one(self, way: str) -> None:
        """A request of some kind; notes how it ended."""
        if way == "nonsense":
            await self.nonsense(*self.rng.choice(NONSENSE))
            return
        asked, pause = self.rng.choice(self.marked), 1.0
        while True:
            try:
                await self.marked_one(way, asked)
                self.outcomes[way] += 1
            except TimeoutError:
                self.outcomes["left"] += 1
            except _Status as error:
                if error.status == 429 and error.later is not None:
                    self.sent_away += 1
                    await asyncio.sleep(error.later * pause * self.rng.uniform(1, 2))
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                self.outcomes[f"{way}: {error.status}"] += 1
                self.wrong.append(f"{way}: {error}")
            return

    async def marked_one(self, way: str, asked: Marked) -> None:
        """Asks for a text, and reads as much of it as this way does."""
        if way == "leave":
            within = self.rng.expovariate(2.0)
            await asyncio.wait_for(self.text(asked.body), within)
        elif way == "leave in a stream":
            await self.streamed(asked.body, self.rng.randrange(4))
        else:
            ask = self.text if way == "whole" else self.streamed
            echo = {"echo": True} if self.echoes and self.rng.random() < 0.5 else {}
            expected = asked.body["prompt"] + asked.text if echo else asked.text
            if (text := await ask({**asked.body, **echo})) != expected:
                self.wrong.append(f"{asked.body['prompt'][:20]!r}: {text!r}, {expected!r}")

    async def nonsense(self, path: str, body: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=raw, headers=headers) as answer:
            found = await answer.json()
            self.outcomes[f"nonsense: {answer.status}"] += 1
            if not 400 <= answer.status < 500 or not found["error"]["message"]:
                self.wrong.append(f"nonsense {raw[:60]!r}: {answer.status} {found}")

    async def run(self) -> None:
        """All requests, each when its time has come."""
        load = Load(Scenario(1, 1), "open", self.args.rate, 0.0, self.args.requests, self.args.seed)
        start, tasks = time.monotonic(), []
        for at in load.arrivals():
            await asyncio.sleep(start + at - time.monotonic())
            way = self.rng.choices(list(WAYS), list(WAYS.values()))[0]
            tasks.append(asyncio.create_task(self.one(way)))
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if done is not None:
                self.wrong.append(f"no answer: {done!r}")

    async def drain(self, process: subprocess.Popen[str]) -> None:
        """The end: texts that run go on, and others are told so."""
        longest = max(self.marked, key=lambda each: each.body["max_tokens"])
        going = [asyncio.create_task(self.streamed(longest.body)) for _ in range(4)]
        while await self.figure("jkvq_running") + await self.figure("jkvq_waiting") < 4:
            if all(task.done() for task in going):
                break
        process.send_signal(signal.SIGTERM)
        refused = False
        while process.poll() is None and not refused:
            try:
                await self.text(self.marked[0].body)
            except _Status as error:
                refused = error.status == 503
                if not refused:
                    self.wrong.append(f"while it ends: {error}")
            except aiohttp.ClientError:
                break
        self.outcomes["ending: 503"] += refused
        for text in await asyncio.gather(*going, return_exceptions=True):
            if text != longest.text:
                self.wrong.append(f"while it ends: {text!r}")

    async def figure(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


class _Status(Exception):
    """An answer that is an error; ``later``: seconds after which to come again, if it says so."""

    def __init__(self, status: int, body: dict[str, Any], later: float | None = None):
        super().__init__(f"{status} {body['error']['message']}")
        self.status, self.later = status, later


async def _status(answer: aiohttp.ClientResponse) -> _Status:
    later = answer.headers.get("Retry-After")
    return _Status(answer.status, await answer.json(), None if later is None else float(later))


async def soak(args: argparse.Namespace) -> bool:
    """Runs everything; returns whether all was right."""
    command = [sys.executable, "-m", "scripts.server.soak", "--serve", *sys.argv[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sizes: list[float] = []
    try:
        port = await asyncio.to_thread(process.stdout.readline)
        timeout, many = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=many) as session:
            run = Soak(args, f"http://127.0.0.1:{int(port)}", session)
            await _until_ready(run)
            await run.learn()
            print(f"{len(run.marked)} prompts answered alone", flush=True)
            watching = asyncio.create_task(_watch(process.pid, sizes, run))
            start = time.monotonic()
            await run.run()
            seconds = time.monotonic() - start
            watching.cancel()
            preempted = await run.figure("jkvq_preemptions_total")
            evicted = await run.figure("jkvq_evictions_total")
            cached = await run.figure("jkvq_cached_tokens_total")
            await run.drain(process)
        left = json.loads(await asyncio.to_thread(process.stdout.readline))
        process.wait(60)
    finally:
        process.kill()
    quarter = max(1, len(sizes) // 4)
    early, late = (statistics.median(each) for each in (sizes[quarter:-quarter], sizes[-quarter:]))
    print(f"{args.requests} requests in {seconds:.0f} s: {dict(sorted(run.outcomes.items()))}")
    print(f"told to come again {run.sent_away} times")
    print(f"preempted {preempted:.0f}, evicted {evicted:.0f}, prompt tokens found {cached:.0f}")
    print(f"memory {early:.0f} MB, at the end {late:.0f} MB; pages not given back: {left}")
    print(f"exit code {process.returncode}; wrong: {len(run.wrong)}", *run.wrong[:10], sep="\n  ")
    counted = sum(run.outcomes.values()) - run.outcomes["ending: 503"]
    flat = late <= GROWTH * early
    return (
        not (run.wrong or any(left.values()) or process.returncode or counted != args.requests)
        and flat
    )


async def _until_ready(run: Soak) -> None:
    while True:
        try:
            async with run.session.get(f"{run.url}/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)


async def _watch(pid: int, sizes: list[float], run: Soak) -> None:
    """Notes how much memory a process has, in MB, every second; says how far it is."""
    while True:
        if sizes and len(sizes) % 60 == 0:
            done, wrong = sum(run.outcomes.values()), len(run.wrong)
            print(f"{done} of {run.args.requests}, wrong {wrong}: {sizes[-1]:.0f} MB", flush=True)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes += [int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS")]
        await asyncio.sleep(1)


def serve(args: argparse.Namespace) -> None:
    """The server, with a pool of half the tokens that its slots may need; says what is left."""
    llm = jkvq.load(args.model, cache=args.cache, check=False)
    needs = [
        len(llm.tokenizer.encode(body["prompt"])) + body["max_tokens"] for body in bodies(args)
    ]
    pool = max(args.slots * statistics.mean(needs) / 2, max(needs) + llm.spec.page)
    place = bind("127.0.0.1", 0)
    server = Server(
        dataclasses.replace(llm, pool_tokens=int(pool)), place, name="soak", slots=args.slots
    )
    server.warm_up()
    print(place.getsockname()[1], flush=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    signal.sigwait({signal.SIGTERM})
    server.end()
    thread.join()
    scheduler = server.driver.engine._scheduler
    scheduler.prefix.clear()  # what is left then is nobody's
    pools = {name: getattr(scheduler, name).used for name in ("packed", "exact", "local")}
    print(json.dumps(pools))


def main() -> None:
    """Runs it, and exits with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache", default="saw-int4,sink=64,recent=64")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=24, help="different ones")
    parser.add_argument("--longest", type=int, default=1200, help="letters of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rate = args.requests / (60 * args.minutes)
    if args.serve:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        serve(args)
    else:
        sys.exit(0 if asyncio.run(soak(args)) else 1)


if __name__ == "__main__":
    main()
