"""Clients of several gateways: `load.py OUT RATE URL...` asks until OUT.stop is there, then ends its open requests.

Arrivals do not wait for answers. Requests go to the gateways in turn, as a load balancer leads them. One whose
connection is refused or cut is sent again as a whole, to the next gateway: docs/guides/several-gateways.md asks that of
clients. Each request is a line of JSON in OUT when it has ended.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

LIMIT_S = 120.0
ANSWER_TOKENS = 24
SHORT_TOKENS = 300
LONG_TOKENS = 9000
LONG_EVERY = 4
"""One prompt of so many is long."""
DONE = b"data: [DONE]\n\n"


async def asked_once(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What became of a request at one gateway: its route, or `cut`, or `failed`."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            raw = await response.read()
            if response.status != 200:
                return {"failed": f"{response.status}: {raw[-300:].decode(errors='replace')}"}
            if not raw.endswith(DONE):
                return {"failed": f"a stream without an end: {raw[-300:].decode(errors='replace')}"}
            return {"route": response.headers["x-prfaas-route"].partition(";")[0]}
    except aiohttp.ClientError as error:
        return {"cut": repr(error)}
    except TimeoutError:
        return {"failed": f"no answer in {LIMIT_S:g} s"}


async def asked(session: aiohttp.ClientSession, urls: list[str], number: int, out: TextIO) -> None:
    """One request, at one gateway and then at the other."""
    length = SHORT_TOKENS if number % LONG_EVERY else LONG_TOKENS
    ids = random.Random(number).choices(range(10, 250), k=length)
    body = {"model": "qwen3-next", "prompt": ids, "max_tokens": ANSWER_TOKENS, "stream": True}
    told: dict[str, Any] = {"number": number, "long": length == LONG_TOKENS, "cut_by": []}
    began_s = time.monotonic()
    for turn in range(len(urls)):
        url = urls[(number + number // LONG_EVERY + turn) % len(urls)]
        became = await asked_once(session, url, body)
        told |= {"gateway": url, **became}
        if "cut" not in became:
            break
        told["cut_by"].append(url)
    else:
        told["failed"] = "every gateway has cut it"
    out.write(json.dumps({**told, "seconds": round(time.monotonic() - began_s, 2)}) + "\n")
    out.flush()


async def main(path: Path, rate_per_s: float, urls: list[str]) -> None:
    stop = path.with_suffix(".stop")
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    with path.open("a") as out:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            asyncio.TaskGroup() as requests,
        ):
            for number in itertools.count():
                if stop.exists():
                    break
                requests.create_task(asked(session, urls, number, out))
                await asyncio.sleep(1 / rate_per_s)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
