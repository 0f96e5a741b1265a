"""A config of configs/ as a plan, by the rules of src/config: the same keys, defaults and derived sizes.

Only what peers need: checking is the Rust side's, and a test compares the two on every built-in config.
"""

import json
import pathlib
import tomllib

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

SAMPLE_SHAPES = {"digits": ([1, 8, 8], 10), "mnist10k": ([1, 28, 28], 10)}

DDP = {
    "bucket_cap_mb": 25.0,
    "first_bucket_mb": 1.0,
    "overlap": True,
    "gradient_as_bucket_view": False,
    "find_unused_parameters": False,
    "static_graph": False,
    "broadcast_buffers": True,
    "init_sync": True,
    "accumulate": 1,
    "join": False,
    "sync_batch_norm": False,
}


def load(config, sets=(), cards=None):
    """The plan of a config (a TOML file, a built-in name, or a plan.json), with `key=value` over it."""
    path = pathlib.Path(config)
    if not path.exists() and (CONFIGS / f"{config}.toml").exists():
        path = CONFIGS / f"{config}.toml"
    if path.suffix == ".json":
        if sets or cards is not None:
            raise ValueError("a plan.json is decided: --set and --cards belong to a config")
        content = json.loads(path.read_text())
        return content.get("plan", content)
    keys = {}
    for section, values in tomllib.loads(path.read_text()).items():
        keys.update({f"{section}.{key}": value for key, value in values.items()})
    for pair in sets:
        key, _, value = pair.partition("=")
        keys[key.strip()] = scalar(value.strip())
    if cards is not None:
        keys["run.cards"] = cards
    return resolve(keys)


def scalar(text):
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def resolve(keys):
    """Keys as a config has them, to a whole plan."""
    get = keys.get
    cards = get("run.cards", 2)
    model_name = get("model.name", "mlp")
    data_name = get("data.name", "tokens" if model_name == "gpt" else "mnist10k")
    if data_name == "synthetic":
        shape, classes = get("data.shape", [1, 28, 28]), get("data.classes", 10)
        source = {"name": data_name, "shape": shape, "classes": classes, "samples": get("data.samples", 8192)}
    elif data_name == "tokens":
        context = get("data.context", get("model.context", 64))
        vocabulary = get("data.vocabulary", get("model.vocabulary", 512))
        source = {"name": data_name, "context": context, "vocabulary": vocabulary, "samples": get("data.samples", 8192)}
    else:
        shape, classes = SAMPLE_SHAPES[data_name]
        source = {"name": data_name}
    if model_name == "gpt":
        model = {
            "width": get("model.width", 256),
            "heads": get("model.heads", 4),
            "layers": get("model.layers", 4),
            "context": source["context"],
            "vocabulary": source["vocabulary"],
        }
    elif model_name == "mlp":
        width = 1
        for size in shape:
            width *= size
        model = {"input": width, "hidden": get("model.hidden", 2048), "classes": classes}
    else:
        model = {"channels": shape[0], "classes": classes}
        if model_name == "convnet":
            model["batch_norm"] = get("model.batch_norm", False)
    if get("optimizer.name", "sgd") == "adam":
        optimizer = {"name": "adam", "lr": get("optimizer.lr", 0.001)}
    else:
        optimizer = {"name": "sgd", "lr": get("optimizer.lr", 0.05), "momentum": get("optimizer.momentum", 0.9)}
    optimizer["weight_decay"] = get("optimizer.weight_decay", 0.0)
    hook = {"name": get("ddp.comm_hook", "none")}
    if hook["name"] == "powersgd":
        hook |= {"rank": get("ddp.powersgd_rank", 1), "start_step": get("ddp.powersgd_start_step", 2)}
    if "batch.global" in keys:
        batch = {"global": keys["batch.global"], "per_card": -(-keys["batch.global"] // cards)}
    else:
        per_card = get("batch.per_card", 64)
        batch = {"global": per_card * cards, "per_card": per_card}
    return {
        "run": {
            "cards": cards,
            "warmup": get("run.warmup", 4),
            "steps": get("run.steps", 16),
            "seed": get("run.seed", 0),
            "threads_per_card": get("run.threads_per_card", 1),
            "precision": get("run.precision", "fp32"),
            "tf32": get("run.tf32", False),
            "deadline_s": get("run.deadline_s", 60.0),
        },
        "model": {"name": model_name, **model},
        "data": {
            "source": source,
            "shuffle": get("data.shuffle", True),
            "drop_last": get("data.drop_last", False),
        },
        "batch": batch,
        "optimizer": optimizer,
        "clip_norm": get("optimizer.clip_norm"),
        "ddp": {key: get(f"ddp.{key}", default) for key, default in DDP.items()} | {"comm_hook": hook},
        "inject": None,
    }
