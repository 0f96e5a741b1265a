"""Runs one of PyTorch's engines on a config, without the Rust program, and writes what it did.

    .peers/bin/python peers/reference.py digits --engine torch_ddp --init weights.safetensors --out DIR

leaves ENGINE.json (losses, step times, ...), ENGINE.gradients.safetensors (first step) and
ENGINE.safetensors (last step) in DIR. Exit status: 0 done, 2 could not run.
"""

import argparse
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import plan as plans

WORKER = pathlib.Path(__file__).resolve().with_name("worker.py")
# What a rank may take, past the deadline of its own waits, to say so.
SILENCE_PAST_DEADLINE = 15


def main():
    arguments = parse()
    try:
        plan = plans.load(arguments.config, arguments.set, arguments.cards)
        if arguments.steps is not None:
            plan["run"] |= {"warmup": 0, "steps": arguments.steps}
        if arguments.print_plan:
            print(json.dumps(plan))
            return 0
        if arguments.out is None:
            raise ValueError("--out is missing")
        result = run(arguments, plan)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps({key: result[key] for key in ("engine", "samples_per_second", "step_ms")}))
    return 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="a TOML file, the name of one in configs/, or a plan.json")
    parser.add_argument("--engine", choices=["torch_single", "torch_dp", "torch_ddp"], default="torch_ddp")
    parser.add_argument("--cards", type=int, help="ranks, and shares of the global batch [default: the config's, else 2]")
    parser.add_argument("--init", help="safetensors file to start from [default: torch's own initialisation]")
    parser.add_argument("--out", help="folder for what it leaves")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any config key")
    parser.add_argument("--steps", type=int, help="steps in all, none of them warm-up")
    parser.add_argument(
        "--permute-rows", action="store_true", help="sum in another order: permute the rows inside every batch"
    )
    parser.add_argument("--print-plan", action="store_true", help="print the plan and do nothing")
    return parser.parse_args()


def run(arguments, plan):
    """Starts the ranks, hears them, and writes the record."""
    out = pathlib.Path(arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    engine, cards = arguments.engine, plan["run"]["cards"]
    ranks = cards if engine == "torch_ddp" else 1
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            {
                "plan": plan,
                "engine": engine,
                "rank": rank,
                "world_size": ranks,
                "cards": [
                    {"index": card, "kind": "virtual", "cores": [cores[card % len(cores)]]} for card in range(cards)
                ],
                "store": {"file": os.path.join(folder, "store")} if engine == "torch_ddp" else None,
                "init": str(pathlib.Path(arguments.init).resolve(strict=True)) if arguments.init else None,
                "save_initial": None,
                "save_gradients": str(out / f"{engine}.gradients.safetensors"),
                "save_final": str(out / f"{engine}.safetensors"),
                "permute_rows": arguments.permute_rows,
            }
            for rank in range(ranks)
        ]
        messages = converse(jobs, plan["run"]["deadline_s"] + SILENCE_PAST_DEADLINE)
    record = summarise(engine, plan, messages)
    (out / f"{engine}.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def converse(jobs, silence):
    """Every rank's messages. The first that fails, falls silent or dies stops the others and is reported."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    heard = queue.Queue()
    workers = []

    def listen(rank, stream):
        for line in stream:
            heard.put((rank, json.loads(line)))
        heard.put((rank, {"message": "ended"}))

    try:
        for job in jobs:
            worker = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            workers.append(worker)
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            threading.Thread(target=listen, args=(job["rank"], worker.stdout), daemon=True).start()
        messages = [[] for _ in jobs]
        done = set()
        last = time.monotonic()
        while len(done) < len(jobs):
            try:
                rank, message = heard.get(timeout=1)
            except queue.Empty:
                if time.monotonic() - last > silence:
                    raise RuntimeError(f"no rank has said anything for {silence:.0f} s") from None
                continue
            last = time.monotonic()
            if message["message"] == "failed":
                raise RuntimeError(f"rank {rank}: {message['error']}")
            if message["message"] == "done":
                done.add(rank)
            elif message["message"] == "ended" and rank not in done:
                raise RuntimeError(f"rank {rank} died (exit status {workers[rank].wait()})")
            messages[rank].append(message)
        return messages
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def summarise(engine, plan, messages):
    """The ranks' messages as one record, under the names of our results.json."""
    steps = [[m for m in rank if m["message"] == "step"] for rank in messages]
    warmup = plan["run"]["warmup"]
    losses, lengths = [], []
    for reports in zip(*steps):
        samples = sum(report["samples"] for report in reports)
        losses.append(sum(report["loss"] * report["samples"] for report in reports) / samples)
        lengths.append((max(r["end"] for r in reports) - min(r["start"] for r in reports)) / 1e6)
    measured = lengths[warmup:]
    wall = (max(rank[-1]["end"] for rank in steps) - min(rank[warmup]["start"] for rank in steps)) / 1e9
    real = sum(report["samples"] - report["repeated"] for rank in steps for report in rank[warmup:])
    quantiles = statistics.quantiles(measured, n=20, method="inclusive") if len(measured) > 1 else measured * 19
    return {
        "engine": engine,
        "cards": 1 if engine == "torch_single" else plan["run"]["cards"],
        "global_batch": plan["batch"]["global"],
        "batch_per_card": plan["batch"]["per_card"],
        "samples_per_second": real / wall,
        "step_ms": {
            "median": statistics.median(measured),
            "p5": quantiles[0],
            "p95": quantiles[-1],
            "mean": statistics.fmean(measured),
        },
        "losses": losses,
        "weights_digests": [m["digest"] for rank in messages for m in rank if m["message"] == "weights"],
        "plan": plan,
    }


if __name__ == "__main__":
    sys.exit(main())
