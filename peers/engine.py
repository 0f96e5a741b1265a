"""PyTorch's engines: one card, nn.DataParallel, DistributedDataParallel. What a PyTorch user would write."""

import contextlib
import datetime
import hashlib
import os
import queue
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import data
import models
from worker import Failure, own_card

# Batches that are ready before they are asked for, as in our own loader.
AHEAD = 2
# Names of src/model/state.rs, whose digest this repeats.
KINDS = {torch.float32: "Float", torch.int64: "Int64"}


def run(job, send):
    """All of a worker's life between its job and `done`."""
    plan, card = job["plan"], own_card(job)
    torch.set_num_threads(plan["run"]["threads_per_card"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = plan["run"]["tf32"]
    torch.manual_seed(plan["run"]["seed"])
    device = torch.device("cuda", ordinal(card)) if card["kind"] == "cuda" else torch.device("cpu")
    if plan["inject"]:
        raise Failure("usage", "inject: PyTorch's engines cannot be slowed down", "leave inject or the peers out")

    inputs, targets = data.load(plan)
    model = models.build(plan["model"]).to(device)
    if job["init"]:
        model.load_state_dict(load_file(job["init"]), strict=True)
    if job["engine"] == "torch_ddp" and job["world_size"] > 1:
        join_group(job, device)
    trainer = Trainer(job, model, device)
    if job["rank"] == 0 and job["save_initial"]:
        save(model.state_dict(), job["save_initial"])
    batches = Prefetched(part(job, inputs, targets), device, plan["run"]["deadline_s"])
    send("ready")
    measure(job, trainer, batches, send)
    if dist.is_initialized() and plan["ddp"]["broadcast_buffers"]:
        # PyTorch gives rank 0's buffers to all before the next forward; ours have them after each step.
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    # Ranks whose buffers are not broadcast keep their own: only their weights have to agree.
    own_digest = digest(model, buffers=plan["ddp"]["broadcast_buffers"])
    send("weights", digest=own_digest, skipped_steps=trainer.skipped_steps)
    if job["rank"] == 0 and job["save_final"]:
        save(model.state_dict(), job["save_final"])
    if dist.is_initialized():
        # Gloo's connections close with the process: leave together, so that nobody reports a peer as lost.
        dist.barrier()


def measure(job, trainer, batches, send):
    """Warm-up, then measured steps, in the words of src/engine/run_loop.rs."""
    plan, card = job["plan"]["run"], own_card(job)
    window = None
    for step in range(plan["warmup"] + plan["steps"]):
        if step == plan["warmup"]:
            send("measuring_starts")
            window = time.monotonic_ns(), time.process_time_ns()
        clock = Clock(step, card["index"])
        start = time.monotonic_ns()
        with clock.phase("data"):
            x, y, repeated = batches.next()
        value = trainer.step(x, y, clock)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        end = time.monotonic_ns()
        send(
            "step",
            step=step,
            loss=value,
            samples=len(y),
            repeated=repeated,
            start=start,
            end=end,
            spans=clock.spans,
        )
    totals = {
        "card": card["index"],
        "cores": len(card["cores"] or [0]),
        "wall": time.monotonic_ns() - window[0],
        # All threads of this process: it works for one card. Gloo sleeps while it waits (2 s of waiting for a
        # peer were measured to take 6 ms of CPU, the transfer of 4 MiB included), so waiting is not in it.
        "on_cpu": time.process_time_ns() - window[1],
        "wait_cpu": 0,
        # Nobody counts a CPU's tensors here; missing, not zero.
        "memory_peak_bytes": None,
    }
    if trainer.device.type == "cuda":
        totals["memory_peak_bytes"] = torch.cuda.max_memory_allocated(trainer.device)
    send("measuring_ends")
    send("card_totals", **totals)


class Clock:
    """Phases of one step on one card."""

    def __init__(self, step, card):
        self.step, self.card, self.spans = step, card, []

    @contextlib.contextmanager
    def phase(self, name):
        start = time.monotonic_ns()
        yield
        duration = time.monotonic_ns() - start
        self.spans.append(
            {"step": self.step, "card": self.card, "phase": name, "start": start, "duration": duration}
        )


class Trainer:
    """A model, wrapped as the engine wraps it, and its optimiser."""

    def __init__(self, job, model, device):
        plan = job["plan"]
        self.device, self.model, self.ddp = device, model, plan["ddp"]
        self.clip_norm, self.precision = plan["clip_norm"], plan["run"]["precision"]
        self.save_gradients = job["save_gradients"] if job["rank"] == 0 else None
        self.world_size = job["world_size"]
        self.wrapped = wrap(job, model, device)
        self.skipped_steps = 0
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        options = plan["optimizer"]
        if options["name"] == "adam":
            self.optimizer = torch.optim.Adam(
                model.parameters(), lr=options["lr"], weight_decay=options["weight_decay"]
            )
        else:
            self.optimizer = torch.optim.SGD(
                model.parameters(),
                lr=options["lr"],
                momentum=options["momentum"],
                weight_decay=options["weight_decay"],
            )

    def step(self, x, y, clock):
        """Forward, backward, update; the mean loss over these samples."""
        self.optimizer.zero_grad()
        value = self.backward(x, y, clock)
        self.scaler.unscale_(self.optimizer)
        if self.save_gradients:
            gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
            save(gradients, self.save_gradients)
            self.save_gradients = None
        with clock.phase("update"):
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # It shrinks after a step that it left out, and only then.
            self.skipped_steps += self.scaler.get_scale() < scale
        return value

    def backward(self, x, y, clock):
        is_ddp = isinstance(self.wrapped, DistributedDataParallel)
        micro = self.ddp["accumulate"] if is_ddp else 1
        parts = list(zip(x.chunk(micro), y.chunk(micro)))
        value = 0.0
        for number, (part_x, part_y) in enumerate(parts, 1):
            last = number == len(parts)
            sync = is_ddp and self.ddp["overlap"] and last
            with self.wrapped.no_sync() if is_ddp and not sync else contextlib.nullcontext():
                with self.autocast():
                    with clock.phase("forward"):
                        output = self.wrapped(part_x)
                    with clock.phase("loss"):
                        loss = models.loss(output, part_y) * (len(part_y) / len(y))
                        value += loss.item()
                with clock.phase("backward"):
                    self.scaler.scale(loss).backward()
        if is_ddp and not self.ddp["overlap"]:
            with clock.phase("reduce"):
                self.reduce_afterwards()
        return value

    def autocast(self):
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.bfloat16)
        return torch.autocast(self.device.type, dtype=kind, enabled=self.precision != "fp32")

    def reduce_afterwards(self):
        """What DDP does with `overlap = false`: backward first, then the averages."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients).div_(self.world_size)
        dist.all_reduce(flat)
        for gradient, average in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
            gradient.copy_(average)


class Ddp(DistributedDataParallel):
    """Heeds the size of the first bucket beside any cap: PyTorch does so only beside the cap it has by default."""

    bucket_bytes_cap_default = property(lambda self: True, lambda self, value: None)


def powersgd(state, bucket):
    """PyTorch's hook, one bucket after another over gloo.

    It starts its second and third all-reduce from callbacks, which ranks run in different orders where several
    buckets are under way: gloo then mixes them up, and aborts or hangs.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if dist.get_backend() == "gloo":
        future.wait()
    return future


def ordinal(card):
    """Its number in this process, whose parent made visible only its own cards, by name."""
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",").index(card["uuid"])


def wrap(job, model, device):
    engine, options = job["engine"], job["plan"]["ddp"]
    if engine == "torch_single":
        return model
    if engine == "torch_dp":
        if device.type != "cuda":
            raise Failure("unavailable", "torch_dp: nn.DataParallel needs CUDA cards", "leave torch_dp out")
        return nn.DataParallel(model, device_ids=[ordinal(card) for card in job["cards"]])
    if job["world_size"] == 1:
        # DistributedDataParallel wants a group, also of one.
        job["store"] = job["store"] or {"file": tempfile.mkstemp()[1]}
        join_group(job, device)
    for unsupported in ("sync_batch_norm", "join"):
        if options[unsupported]:
            raise Failure(
                "usage",
                f"ddp.{unsupported}: PyTorch has no form of it that this engine can run here",
                f"leave ddp.{unsupported} or torch_ddp out",
            )
    # PyTorch has no argument for the first bucket; its reducer reads this.
    dist._DEFAULT_FIRST_BUCKET_BYTES = max(1, int(options["first_bucket_mb"] * (1 << 20)))
    wrapped = Ddp(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=options["bucket_cap_mb"],
        broadcast_buffers=options["broadcast_buffers"],
        find_unused_parameters=options["find_unused_parameters"],
        gradient_as_bucket_view=options["gradient_as_bucket_view"],
        static_graph=options["static_graph"],
        init_sync=options["init_sync"],
    )
    hook = options["comm_hook"]
    if hook["name"] == "bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook["name"] == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook["name"] == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=hook["rank"], start_powerSGD_iter=hook["start_step"]
        )
        wrapped.register_comm_hook(state, powersgd)
    return wrapped


def join_group(job, device):
    # Ranks are on one host: its loopback device is there whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = job["store"]
    if "file" not in address:
        raise Failure("usage", "PyTorch's engines meet in a file", "start them with compare")
    store = dist.FileStore(address["file"], job["world_size"])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=datetime.timedelta(seconds=job["plan"]["run"]["deadline_s"]),
    )


def part(job, inputs, targets):
    """This process's batches, and how many rows of each only fill up the epoch."""
    whole = job["engine"] != "torch_ddp"
    # The same rows in another order: the same mathematics, summed differently.
    shuffled = torch.Generator().manual_seed(1) if job.get("permute_rows") else None
    for rows, repeated in data.schedule(job["plan"], len(targets)):
        own = sum(rows, []) if whole else rows[job["rank"]]
        filled = sum(repeated) if whole else repeated[job["rank"]]
        if shuffled is not None:
            own = [own[i] for i in torch.randperm(len(own), generator=shuffled).tolist()]
        index = torch.tensor(own)
        yield inputs[index], targets[index], filled


class Prefetched:
    """Batches that a thread prepares ahead."""

    def __init__(self, batches, device, deadline_s):
        self.ready, self.deadline_s = queue.Queue(AHEAD), deadline_s

        def prepare():
            try:
                for x, y, repeated in batches:
                    self.ready.put((x.to(device), y.to(device), repeated))
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for a batch
                self.ready.put(error)

        threading.Thread(target=prepare, daemon=True).start()

    def next(self):
        try:
            batch = self.ready.get(timeout=self.deadline_s)
        except queue.Empty:
            raise Failure("timeout", f"no batch for {self.deadline_s} s", "raise run.deadline_s") from None
        if isinstance(batch, BaseException):
            raise batch
        return batch


def save(tensors, path):
    """A safetensors file, whole or not at all."""
    # Tied tensors are one in memory and two in a file.
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    unfinished = f"{path}.{os.getpid()}"
    save_file(content, unfinished)
    os.replace(unfinished, path)


def digest(model, buffers=True):
    """State::digest of src/model/state.rs: equal weights give equal digests, in either language."""
    seen, digest = set(), hashlib.sha256()
    own = set() if buffers else {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        if name in own:
            continue
        if tensor.data_ptr() in seen and tensor.numel() > 0:
            continue  # a tied tensor's second name
        seen.add(tensor.data_ptr())
        kind = KINDS.get(tensor.dtype, str(tensor.dtype))
        digest.update(f"{name}\0{kind}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
