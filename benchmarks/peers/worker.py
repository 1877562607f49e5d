"""One process of benchmarks/peers/run.py: trains the demo model with PyTorch, and measures.

The model is a port of examples/train_gpt.py; first parameters, batches and rates come from
a file that run.py wrote, so everyone starts from the same numbers and sees the same tokens.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import hosts
from peers.methods import COMPRESSED, METHODS

DECAY, BETAS = 0.1, (0.9, 0.99)
WARM, HEADS = 2, 4


# ---------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = lambda a: a.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = map(split, self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nnf.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nnf.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @classmethod
    def load(cls, start: dict[str, np.ndarray]) -> "GPT":
        """From Flax's parameters: kernels transposed, layers unstacked."""
        layers, width, _ = start["blocks/qkv/kernel"].shape
        model = cls(start["positions/embedding"].shape[0], width, layers)
        for name, parameter in model.named_parameters():
            *path, leaf = name.split(".")
            index = int(path.pop(1)) if path[0] == "blocks" else None
            kinds = {"weight": ("kernel", "scale", "embedding"), "bias": ("bias",)}[leaf]
            (key,) = [k for k in ("/".join([*path, kind]) for kind in kinds) if k in start]
            value = start[key] if index is None else start[key][index]
            value = torch.tensor(value.T if key.endswith("kernel") else value)
            assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
            parameter.data.copy_(value)
        return model


# ---------------------------------------------------------------- methods


class Trainer:
    """``step(tokens, rate)`` returns the phase; ``loss`` is collective."""

    def __init__(self, method: str, model: GPT, warmup: int) -> None:
        self.method, self.warmup, self.steps = method, warmup, 0
        self.model: nn.Module = model
        if method == "OnebitAdam":
            self._onebit(model)
            return
        if method == "FSDP2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            # One bucket: over gloo the hooks' later collectives of one bucket race with the next's.
            self.model = ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
            if method == "DDP, fp16 hook":
                from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            if method.startswith("PowerSGD"):
                from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

                state = powerSGD_hook.PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=int(method.split()[-1]),
                    start_powerSGD_iter=warmup,
                )
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), betas=BETAS, weight_decay=DECAY
        )

    def _onebit(self, model: GPT) -> None:
        """DeepSpeed's optimizer without its engine, over gloo; one buffer for the whole model.

        Its packer is a GPU kernel and gloo wants scales of one dimension: both are stood in for.
        """
        from deepspeed.runtime.comm import compressed

        class Packer:
            def load(self) -> "Packer":
                return self

            @staticmethod
            def packbits(x: torch.Tensor, size: int, rank: int) -> torch.Tensor:
                return torch.from_numpy(np.packbits((x >= 0).numpy()))

            @staticmethod
            def unpackbits(x: torch.Tensor, size: int, rank: int) -> torch.Tensor:
                return torch.from_numpy(np.unpackbits(x.numpy())).float() * 2 - 1

        class Comm:
            def __getattr__(self, name: str) -> Any:
                return getattr(original, name)

            def all_gather(self, out: Any, x: torch.Tensor, group: Any) -> Any:
                return original.all_gather(out, x.reshape(1) if x.ndim == 0 else x, group=group)

        original = compressed.dist
        compressed.PackbitsBuilder, compressed.dist = Packer, Comm()
        from deepspeed.runtime.fp16.onebit.adam import OnebitAdam

        class Engine:
            mpu, local_rank, enable_backward_allreduce = None, 0, True

        # Parameters become views of one flat buffer, as DeepSpeed's fp16 path lays them.
        parameters = list(model.parameters())
        self.flat = nn.Parameter(torch.cat([p.data.flatten() for p in parameters]))
        self.flat.grad = torch.zeros_like(self.flat)
        at = 0
        for p in parameters:
            p.data = self.flat.data[at : at + p.numel()].view_as(p)
            p.grad = self.flat.grad[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.engine = Engine()
        self.optimizer = OnebitAdam(
            [self.flat],
            self.engine,
            freeze_step=self.warmup,
            betas=BETAS,
            weight_decay=DECAY,
            comm_backend_name="compressed",
        )

    def step(self, tokens: torch.Tensor, rate: float) -> str:
        dense = self.method not in COMPRESSED or self.steps < self.warmup
        if self.method == "OnebitAdam":
            dense = self.engine.enable_backward_allreduce
            self.flat.grad.zero_()
        else:
            self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = rate
        self.model(tokens).backward()
        if self.method == "OnebitAdam" and dense:
            dist.all_reduce(self.flat.grad)
            self.flat.grad /= dist.get_world_size()
        self.optimizer.step()
        self.steps += 1
        return "dense" if dense else "compressed"

    @torch.no_grad()
    def loss(self, tokens: torch.Tensor) -> float:
        """Over examples that all processes share out."""
        total = self.model(tokens.chunk(dist.get_world_size())[dist.get_rank()])
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


# ---------------------------------------------------------------- measurements


def measure_time(args: argparse.Namespace, start: Any, mine: Any) -> list[dict[str, Any]]:
    phases = ("dense", "compressed")[: 1 + (args.method in COMPRESSED)]
    bits = {"dense": 64.0, "compressed": 6.0}
    count = sum(x.size for k, x in start.items() if "/" in k)
    plan = {
        p: [(link, hosts.steps_for(link, bits[p] * count, args.seconds)) for link in args.links]
        for p in phases
    }
    # DeepSpeed's first step only makes its buffers, with dense gradients.
    warmup = WARM + sum(WARM + n for _, n in plan["dense"])
    trainer, batches, rows = Trainer(args.method, GPT.load(start), warmup), iter(mine), []

    def run(count: int, wanted: str) -> None:
        for _ in range(count):
            phase = trainer.step(next(batches), 1e-4)
            assert phase == wanted, f"{phase} step where a {wanted} one was due"

    def link_to(link: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            hosts.set_links(dist.get_world_size(), link)
        dist.barrier()

    for phase in phases:
        link_to("unlimited")
        run(WARM, phase)
        for link, count in plan[phase]:
            link_to(link)
            run(WARM, phase)
            dist.barrier()
            before, began = hosts.counters(), time.perf_counter()
            run(count, phase)
            elapsed = time.perf_counter() - began
            dist.barrier()
            sent = hosts.difference(hosts.counters(), before)
            rows.append(
                {
                    "link": link,
                    "phase": phase,
                    "steps": count,
                    "seconds": elapsed / count,
                    "interface": {k: v / count for k, v in sent.items()},
                    "payload": hosts.payload(sent) / count,
                }
            )
    return rows


def measure_loss(args: argparse.Namespace, start: Any, mine: Any) -> list[dict[str, Any]]:
    steps, dense, rows = args.steps, 0, []
    held_out = torch.tensor(start["held_out"]).long()
    trainer = Trainer(args.method, GPT.load(start), max(1, steps // 4))
    for i in range(steps):
        dense += trainer.step(mine[i], float(start["rates"][i])) == "dense"
        if (i + 1) % 20 == 0 or i + 1 == steps:
            loss = trainer.loss(held_out)
            rows.append({"step": i + 1, "loss": round(loss, 5), "dense_steps": dense})
            if dist.get_rank() == 0:
                print(f"step {i + 1}: held-out loss {loss:.4f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measure", choices=("time", "loss"))
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--links", type=lambda s: s.split(","), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--start", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.method == "OnebitAdam":
        import deepspeed

        address, port = args.coordinator.split(":")
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port, LOCAL_RANK="0")
        os.environ.update(RANK=str(args.process_id), WORLD_SIZE=str(args.processes))
        # Processes of one machine would talk through shared memory, past the links.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{args.coordinator}",
            rank=args.process_id,
            world_size=args.processes,
        )
    start: dict[str, np.ndarray] = dict(np.load(args.start))
    batches = torch.tensor(start["batches"]).long()
    mine = batches.chunk(args.processes, dim=1)[args.process_id]
    measure = {"time": measure_time, "loss": measure_loss}[args.measure]
    rows = measure(args, start, mine)
    versions = {"torch": torch.__version__}
    if args.method == "OnebitAdam":
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    count = sum(x.size for k, x in start.items() if "/" in k)
    result = {"rows": rows, "versions": versions, "parameters": count}
    args.out.joinpath(f"{args.process_id}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
