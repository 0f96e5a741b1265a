"""One process of a PyTorch engine, under the protocol of src/launch: a job in, messages out.

`dp-vs-ddp compare --peers torch` starts it as it starts its own workers; reference.py does the same.
"""

import ctypes
import json
import os
import re
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def claim_stdout():
    """Takes standard output for messages alone: a library that prints must not break the protocol."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return messages


def end_with_parent():
    """The parent's end of standard input closes when it ends, whatever killed it."""
    # For a parent that dies while this process is stopped and cannot see the end of its input.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch():
        while os.read(0, 64):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def read_job():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return json.loads(line)


class Failure(Exception):
    """An error with its kind and hint, as the Rust side knows them."""

    def __init__(self, kind, error, hint=None):
        super().__init__(error)
        self.kind, self.hint = kind, hint


def describe(error):
    """What a failure is to the parent."""
    if isinstance(error, Failure):
        return error.kind, str(error), error.hint
    text = str(error).split("\nException raised from")[0].strip() or type(error).__name__
    hint = None
    if "out of memory" in text or "can't allocate memory" in text:
        kind = "out_of_memory"
    elif re.search("timed out|timeout", text, re.IGNORECASE):
        kind, hint = "timeout", "raise run.deadline_s if a step or the start may take that long"
    elif "gloo" in text or "nccl" in text.lower():
        # A peer has gone: what became of it is the parent's to find out.
        kind = "worker"
    else:
        kind = "torch"
    # Where in PyTorch's sources it was raised helps nobody here.
    text = re.sub(r"^\[\S+:\d+\] ", "", text)
    return kind, f"{type(error).__name__}: {text}", hint


def main():
    messages = claim_stdout()

    def send(message, **fields):
        messages.write(json.dumps({"message": message, **fields}) + "\n")

    try:
        job = read_job()
        end_with_parent()
        cores = own_card(job)["cores"]
        if cores:
            # Before torch starts threads, so that they inherit it.
            os.sched_setaffinity(0, cores)
        import engine

        engine.run(job, send)
        send("done")
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        kind, text, hint = describe(error)
        send("failed", kind=kind, error=text, hint=hint)
        messages.flush()
        os._exit(2)
    messages.flush()
    # Not through destructors: a process group waits in them for peers that may be gone.
    os._exit(0)


def own_card(job):
    return job["cards"][job["rank"]]


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.modules["worker"] = sys.modules["__main__"]
    main()
